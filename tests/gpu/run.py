"""Everything that needs a GPU, in one call, on a host that may have no network.

    python tests/gpu/run.py --pack .gpu --out OUT
    a bare host: installs what pack.py made, then does all the work
    python tests/gpu/run.py --out OUT
    a host on which headstock and the kernel libraries are installed

`--pack .gpu --parts none` installs and does no more.

Parts (`--parts a,b`): kernels and trtllm (each backend against float32), triton_attention (the same
of `triton`, and its times at Gemma-4's shapes), checks (`plugins check`),
ops (operations against torch's), tokens (the demo model's answers for each pair of backends),
switches (the same with every option alone and together), speed (attention alone), bench
(workloads), step_time (a step by kernels), sweep (streams, contexts, other workloads), bounds (long
prompts beside streams), prompts (replayed steps with prompt tokens), shared_prefix (decode rows
that share pages), drafts (what a proposer gains and costs), rules (masks and logits processors),
serve (a server beside the engine in process), start (a process to its first token, and late
captures), first_token (where an idle engine's first token goes, part by part), stream_host (what
the host takes of a step of many streams), tests (pytest:
tests/backends, and the rows of tests/features.md that need a GPU). Each writes OUT/PART.json; one
that fails does not stop the others.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tarfile
import time
import traceback
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PARTS = (
    "kernels",
    "trtllm",
    "triton_attention",
    "checks",
    "ops",
    "numerics",
    "tokens",
    "switches",
    "speed",
    "bench",
    "step_time",
    "sweep",
    "bounds",
    "prompts",
    "shared_prefix",
    "drafts",
    "rules",
    "serve",
    "start",
    "first_token",
    "stream_host",
    "tests",
)
HERE = Path(__file__).parent
SUPPORT = HERE.parent / "support"
BUILDS = (
    ("bfloat16", "bfloat16", "auto", "auto"),
    ("bfloat16", "bfloat16", "fa2", "off"),
    ("float16", "float16", "fa2", "auto"),
    ("float16", "float16", "fa2", "off"),
    ("float16", "float16", "auto", "auto"),
    ("bfloat16", "float8_e4m3fn", "fa2", "auto"),
    *(
        ("bfloat16", "bfloat16", *kind, size)
        for kind in (("auto", "auto"), ("fa2", "off"))
        for size in ("64", "256")
    ),
)
"""The FlashInfer kernels that are used: types of queries and KV, prompt templates, tensor cores for
decode, head size where it is not 128.
"""


def install(pack: Path, site: Path) -> None:
    """Put the kernel libraries and this project's wheels into `site`, without a network."""
    site.mkdir(parents=True, exist_ok=True)
    with tarfile.open(pack / "pack.tar.xz") as archive:
        archive.extractall(site.parent, filter="data")
    kept = pack / "kernels.tar.xz"
    if kept.exists():  # compiled on an earlier run; see `keep_kernels`
        with tarfile.open(kept) as archive:
            archive.extractall(site / "flashinfer" / "data" / "aot", filter="data")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--no-compile",
    ]
    subprocess.run(
        [*command, "--target", str(site), *map(str, (pack / "wheels").glob("*.whl"))], check=True
    )


def environment(site: Path) -> dict[str, str]:
    """The environment in which what `install` put there is found."""
    ours = (site, HERE.parent, SUPPORT)
    paths = os.pathsep.join([*map(str, ours), os.environ.get("PYTHONPATH", "")])
    return (
        {"FLASHINFER_CUDA_ARCH_LIST": "9.0a", "MAX_JOBS": "16"} | os.environ | {"PYTHONPATH": paths}
    )


def start_builds(site: Path, out: Path) -> list[subprocess.Popen[bytes]]:
    """Compile FlashInfer's kernels in the background, each kind in a process of its own,
    TensorRT-LLM's in one.
    """
    commands = [[str(HERE / "kernels.py"), "build", *names] for names in BUILDS]
    commands += [[str(HERE / "trtllm.py"), "build", str(out)]]
    return [
        subprocess.Popen([sys.executable, *command], env=environment(site)) for command in commands
    ]


def keep_kernels(out: Path) -> None:
    """Write the compiled kernels to OUT/kernels.tar.xz; beside pack.tar.xz it spares the next run
    the compiler.
    """
    package = find_spec("flashinfer")
    folders = [*Path.home().glob(".cache/flashinfer/*/*/cached_ops")]
    folders += [
        Path(place) / "data" / "aot"
        for place in (package.submodule_search_locations or [] if package else [])
    ]
    built = {
        f"{path.parent.name}/{path.name}": path
        for folder in folders
        for path in sorted(folder.glob("*/*"))
    }
    beside = ("head_dims", "made_with")
    wanted = {
        name: path for name, path in built.items() if path.suffix == ".so" or path.name in beside
    }
    if not wanted:
        return
    with tarfile.open(out / "kernels.tar.xz", "w:xz", preset=6) as archive:
        for name, path in wanted.items():
            archive.add(path, name)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pack", type=Path, help="the folder that pack.py made")
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument(
        "--site", type=Path, default=Path("/tmp/headstock-gpu/site"), help="where to install"
    )
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.pack is not None:
        install(asked.pack, asked.site)
        if asked.parts == "none":
            return 0
        again = [sys.executable, __file__, "--out", str(asked.out), "--parts", asked.parts]
        return subprocess.run(again, env=environment(asked.site), check=False).returncode
    sys.path[:0] = [str(HERE.parent), str(SUPPORT)]
    builds = start_builds(asked.site, asked.out)
    failed = [part for part in asked.parts.split(",") if not run(part, asked.out, builds)]
    keep_kernels(asked.out)
    return 1 if failed else 0


def run(part: str, out: Path, builds: list[subprocess.Popen[bytes]]) -> bool:
    """Whether a part ran and found nothing wrong; its findings are in OUT/PART.json."""
    began = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    os.environ["GPU_OUT"] = str(out)
    try:
        found = tests() if part == "tests" else import_module(f"gpu.{part}").main(builds)
    except Exception:
        found = {"ok": False, "error": traceback.format_exc()}
        sys.stderr.write(found["error"])
    found["seconds"] = round(time.monotonic() - began, 1)
    (out / f"{part}.json").write_text(json.dumps(found, indent=1))
    sys.stderr.write(f"{part}: {'ok' if found['ok'] else 'FAILED'} after {found['seconds']} s\n")
    return bool(found["ok"])


def tests() -> dict[str, Any]:
    """The tests that run on CUDA where they can: the backends' own, and those of rows that need a
    GPU.
    """
    files = (
        HERE.parent / "backends",
        HERE / "test_rows.py",
        HERE / "test_experts.py",
        HERE / "test_latent.py",
        HERE / "test_states.py",
        HERE / "test_pooling.py",
        HERE / "test_families.py",
        HERE / "test_replayed_families.py",
        HERE / "test_packed.py",
    )
    words = [*map(str, files), "-p", "no:cacheprovider", "--tb=short"]
    words += shlex.split(os.environ.get("GPU_TESTS", ""))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--durations=20", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "ok": done.returncode == 0,
        "code": done.returncode,
        "output": done.stdout[-6000:] + done.stderr[-1000:],
    }


if __name__ == "__main__":
    sys.exit(main())
