"""Who may import whom, and what no source may do."""

from __future__ import annotations

import ast
import os
import re
import resource
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from itertools import chain
from pathlib import Path

import pytest
from source_tree import (
    CORE,
    PLUGINS,
    ROOT,
    Import,
    base_packages,
    command_packages,
    exports,
    files,
    imports,
    packages,
    plugin_names,
    tree,
)

WITHOUT_TORCH = ("spi", "scheduler", "cli", "registry", "config")
HEAVY = ("torch", "transformers", "tokenizers", "safetensors", "triton")
IMPORTED_AS = {"cuda_bindings": "cuda", "pyyaml": "yaml"}
"""Distributions whose modules have another name."""
START_SECONDS = 0.3
LIGHT_SECONDS = 0.05
OPEN_TO_PLUGINS = ("headstock.spi", "headstock.nn", "headstock.ops")


LOADING = f"""
import sys, time
from importlib.metadata import entry_points
import headstock.spi
ours = [entry for kind in headstock.spi.SPI for entry in entry_points(group=f"headstock.{{kind}}")]
for entry in ours:
    if entry.dist.name.startswith("headstock"):
        start = time.process_time()
        entry.load()()
        print(entry.name, time.process_time() - start)
print("heavy", *[each for each in {HEAVY!r} if each in sys.modules])
"""


def offenders(folder: Path, wrong: Callable[[Import], bool]) -> list[str]:
    """`file:line name` of every import below `folder` for which `wrong(import)` holds."""
    return [
        f"{path.relative_to(ROOT)}:{each.line} {each.name}"
        for path in files(folder)
        for each in imports(tree(path))
        if wrong(each)
    ]


def is_exported(name: str) -> bool:
    """Whether `headstock.ROOM.NAME` or `headstock.NAME` is in the `__all__` of its room."""
    room, _, attribute = name.rpartition(".")
    rooms = room.split(".")[1:]
    place = CORE.joinpath(*rooms)
    path = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    return name == "headstock" or (
        len(rooms) <= 1 and "registry" not in rooms and path.exists() and attribute in exports(path)
    )


@pytest.mark.parametrize("package", sorted(packages().keys() - {"headstock_conformance"}))
def test_a_plugin_imports_only_the_contract_or_what_core_exports_to_a_command(package: str) -> None:
    others = [each for each in packages() if each not in (package, *base_packages(package))]
    allowed = is_exported if package in command_packages() else lambda name: False

    def wrong(each: Import) -> bool:
        of_core = each.inside("headstock") and not each.inside(*OPEN_TO_PLUGINS)
        return (of_core and not allowed(each.name)) or each.inside(*others)

    assert offenders(packages()[package], wrong) == []


def test_one_plugin_alone_builds_on_others() -> None:
    found = {each: bases for each in packages() if (bases := base_packages(each))}
    assert found == {"headstock_ray": ["headstock_multiprocess", "headstock_openai_server"]}


def test_a_command_imports_what_core_exports_and_no_more() -> None:
    assert is_exported("headstock") and is_exported("headstock.LLM")
    assert is_exported("headstock.config.FlagParser") and is_exported("headstock.errors.shorten")
    for name in (
        "headstock.config.flags.FlagParser",
        "headstock.cli.tables",
        "headstock.cli.main.main",
        "headstock.registry.installed",
        "headstock.llm",
        "headstock.nothing.here",
    ):
        assert not is_exported(name), name


@pytest.mark.parametrize("room", WITHOUT_TORCH)
def test_every_exported_name_exists(room: str) -> None:
    module = import_module(f"headstock.{room}")
    assert [name for name in exports(Path(module.__file__)) if not hasattr(module, name)] == []


def test_core_imports_no_plugin_and_the_checks_of_plugins_late_in_one_module() -> None:
    found = offenders(CORE, lambda each: each.inside(*packages()))
    late = offenders(CORE, lambda each: each.inside("headstock_conformance") and not each.early)
    assert found == late
    assert {each.partition(":")[0] for each in found} == {"core/src/headstock/cli/plugin_check.py"}


def test_only_the_registry_imports_stevedore() -> None:
    importers = offenders(CORE, lambda each: each.inside("stevedore"))
    assert importers
    assert [
        each for each in importers if not each.startswith("core/src/headstock/registry/loading.py")
    ] == []
    assert [
        each
        for folder in packages().values()
        for each in offenders(folder, lambda i: i.inside("stevedore"))
    ] == []


@pytest.mark.parametrize("part", WITHOUT_TORCH)
def test_a_light_part_of_core_imports_no_torch_when_it_is_imported(part: str) -> None:
    assert (CORE / part).is_dir()
    assert offenders(CORE / part, lambda each: each.early and each.inside(*HEAVY)) == []


def test_the_scheduler_imports_only_numpy_attrs_the_contract_and_the_standard_library() -> None:
    allowed = (
        *sys.stdlib_module_names,
        "attrs",
        "numpy",
        "headstock.spi",
        "headstock.errors",
        "headstock.scheduler",
    )
    assert offenders(CORE / "scheduler", lambda each: not each.inside(*allowed)) == []


IMPORT_CIRCLES = {("headstock.spi.model", "headstock.spi.ops")}
"""Importer and imported of what may close a circle: annotations that name each other."""


def find_circle(edges: Mapping[str, set[str]]) -> list[str]:
    """Modules that import each other in turn, the first one again at the end; empty without any."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_the_search_for_import_circles_finds_them() -> None:
    assert find_circle({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert set(find_circle({"a": {"b"}, "b": {"c"}, "c": {"a"}})) == {"a", "b", "c"}


def test_core_has_no_import_circle() -> None:
    """Imports inside functions and for annotations count too: they only hide a circle."""
    modules = {}
    for path in files(CORE):
        parts = ("headstock", *path.relative_to(CORE).with_suffix("").parts)
        modules[".".join(part for part in parts if part != "__init__")] = path
    edges: dict[str, set[str]] = {}
    for module, path in modules.items():
        names = {each.name for each in imports(tree(path))}
        # `from package import name` runs the package, unless the name is a module of it
        targets = {
            name if name in modules else name.rpartition(".")[0] for name in names
        } & modules.keys()
        edges[module] = {
            target for target in targets - {module} if (module, target) not in IMPORT_CIRCLES
        }
    assert edges["headstock.config.effective"] >= {"headstock.config.catalog"}
    assert find_circle(edges) == []


@pytest.mark.parametrize(
    "module",
    ["headstock.spi", "headstock.scheduler.step", "headstock.registry", "headstock.cli.main"],
)
def test_importing_a_light_module_leaves_heavy_ones_out(module: str) -> None:
    script = f"import sys, {module}; print([each for each in {HEAVY!r} if each in sys.modules])"
    assert (
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=600
        ).stdout
        == "[]\n"
    )


def start_command(*arguments: str) -> tuple[float, str]:
    """Processor seconds and output of a start of `headstock ARGUMENTS`.

    Processor time, because other load on the machine is not ours; a start waits for nothing.
    Bytecode is kept, as it is for users: the first start compiles what the next ones find. `main`
    reads the process's own arguments, as the installed command does: only then does it pause
    collections.
    """
    script = (
        "import sys; from headstock.cli.main import main; code = main(); "
        f"print('heavy', [each for each in {HEAVY!r} if each in sys.modules]); sys.exit(code)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": ""},
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, done.stdout


STARTS = pytest.mark.parametrize(
    "arguments", [("--help",), ("plugins", "list"), ("plugins", "list", "--json")], ids=" ".join
)


@STARTS
def test_the_command_line_starts_without_torch(arguments: tuple[str, ...]) -> None:
    _, output = start_command(*arguments)
    assert output.endswith("heavy []\n")


@pytest.mark.full
@STARTS
def test_the_command_line_starts_fast(arguments: tuple[str, ...]) -> None:
    # The fastest, because a busy machine slows a start and nothing quickens one.
    assert any(start_command(*arguments)[0] < START_SECONDS for _ in range(40))


def time_entry_points() -> dict[str, float]:
    """Seconds of a processor for which each of our entry points loads; none imports torch."""
    output = subprocess.run(
        [sys.executable, "-c", LOADING], capture_output=True, text=True, check=True, timeout=600
    ).stdout
    *lines, heavy = output.splitlines()
    assert heavy == "heavy"
    return {name: float(seconds) for name, seconds in (line.split() for line in lines)}


def test_no_entry_point_of_ours_imports_what_is_heavy() -> None:
    assert "eager" in time_entry_points()


@pytest.mark.full
def test_every_entry_point_of_ours_is_light() -> None:
    fastest: dict[str, float] = {}
    for _ in range(5):
        for name, seconds in time_entry_points().items():
            fastest[name] = min(seconds, fastest.get(name, 1.0))
    assert {name: seconds for name, seconds in fastest.items() if seconds > LIGHT_SECONDS} == {}


def names_compared(module: ast.Module, names: set[str]) -> list[int]:
    """The lines on which a value is compared with one of the names."""
    found = []
    for node in ast.walk(module):
        match node:
            case ast.Compare():
                parts = [each for side in (node.left, *node.comparators) for each in ast.walk(side)]
            case ast.MatchValue(value=value):
                parts = [value]
            case ast.Call(func=ast.Attribute(attr="startswith" | "endswith"), args=args):
                parts = [each for argument in args for each in ast.walk(argument)]
            case _:
                continue
        found += [
            node.lineno for each in parts if isinstance(each, ast.Constant) and each.value in names
        ]
    return found


def test_the_search_for_compared_names_finds_them() -> None:
    sources = [
        "a == 'radix'",
        "'radix' in b",
        "x in ('fa', 'radix')",
        "match c:\n case 'radix': pass",
        "d.startswith('radix')",
    ]
    assert [names_compared(ast.parse(each), {"radix"}) != [] for each in sources] == [True] * len(
        sources
    )
    assert names_compared(ast.parse("a == 'mixture'; b = 'radix'"), {"radix"}) == []


def test_core_never_compares_plugin_names() -> None:
    names = set(plugin_names())
    assert {"sdpa", "radix", "mixed"} <= names
    found = {
        str(path.relative_to(ROOT)): lines
        for path in files(CORE)
        if (lines := names_compared(tree(path), names))
    }
    assert found == {}


UNSAFE_IMPORTS = ("pickle", "marshal", "shelve", "dill", "cloudpickle", "jinja2.Environment")
UNSAFE_CALLS = {
    "eval",
    "exec",
    "torch.load",
    "yaml.load",
    "yaml.unsafe_load",
    "jinja2.Environment",
    "object.__setattr__",
}


def unsafe(module: ast.Module) -> list[str]:
    """What the module does that no source may: untrusted code or data, frozen records written,
    globals.
    """
    found = [each.name for each in imports(module) if each.inside(*UNSAFE_IMPORTS)]
    for node in ast.walk(module):
        if isinstance(node, ast.Global):
            found.append("global")
        if isinstance(node, ast.Call) and ast.unparse(node.func) in UNSAFE_CALLS:
            found.append(ast.unparse(node.func))
    return found


def test_the_search_for_unsafe_code_finds_it() -> None:
    sources = [
        "import pickle",
        "eval('1')",
        "torch.load(f)",
        "object.__setattr__(a, 'b', 1)",
        "def f():\n global g",
    ]
    sources += ["from jinja2 import Environment", "from pickle import loads"]
    assert [unsafe(ast.parse(each)) != [] for each in sources] == [True] * len(sources)
    assert (
        unsafe(ast.parse("model.eval(); from jinja2.sandbox import ImmutableSandboxedEnvironment"))
        == []
    )


def test_no_source_does_what_is_unsafe() -> None:
    found = {
        str(path.relative_to(ROOT)): what for path in all_sources() if (what := unsafe(tree(path)))
    }
    assert found == {}


def all_sources() -> list[Path]:
    """Every Python file that is packaged, the developer's commands and the scripts beside
    packages.
    """
    folders = [CORE, ROOT / "noxfile.py", *packages().values(), *ROOT.glob("models/*/training")]
    return [path for folder in folders for path in files(folder)]


@pytest.mark.parametrize(
    "member", [ROOT / "core", *PLUGINS], ids=lambda each: str(each.relative_to(ROOT))
)
def test_a_member_declares_what_it_imports(member: Path) -> None:
    project = tomllib.loads((member / "pyproject.toml").read_text())["project"]
    needs = [*project["dependencies"], *chain(*project.get("optional-dependencies", {}).values())]
    declared = {re.match(r"[\w.-]+", each).group().replace("-", "_").lower() for each in needs}
    modules = {IMPORTED_AS.get(each, each) for each in declared}
    known = {
        *sys.stdlib_module_names,
        *modules,
        "headstock",
        *(path.name for path in (member / "src").iterdir()),
    }
    found = {
        each.name.split(".")[0] for path in files(member / "src") for each in imports(tree(path))
    }
    assert sorted(found - known) == []
