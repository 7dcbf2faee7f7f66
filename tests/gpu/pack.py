"""Pack this project and the GPU kernel libraries for a bare x86-64 host with CUDA 13, Python 3.12
and torch 2.11.

    python tests/gpu/pack.py .gpu             all of it: .gpu/wheels and .gpu/pack.tar.xz (25 MB)
    python tests/gpu/pack.py .gpu --wheels    this project's wheels only

The host needs no network: `run.py` beside this file installs what is here. `.gpu` is ignored by
    git.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
GLIBCS = (39, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5)
KERNELS = ("flashinfer-python==0.6.18.post1", "apache-tvm-ffi==0.1.9")
PURE = ("llguidance==1.9.1", "stevedore==5.10.0")
SERVER = ("httptools==0.9.0", "msgspec==0.22.0", "starlette==1.10.0", "uvicorn==0.54.0")
VLLM = "vllm==0.24.0"
WANTED_OF_VLLM = ("_vllm_fa3_C.abi3.so", "dist-info/METADATA")
"""FlashAttention-3's library, and what says that vllm is installed; nothing else of it is used."""


def build_wheels(folder: Path) -> None:
    """Build the wheel of every member into `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    for member in (
        ROOT / "core",
        *sorted(path.parent for path in ROOT.glob("[!.]*/*/pyproject.toml")),
    ):
        command = [
            sys.executable,
            "-m",
            "hatchling",
            "build",
            "-t",
            "wheel",
            "-d",
            str(folder.absolute()),
        ]
        subprocess.run(command, check=True, cwd=member, capture_output=True)


def download(requirements: tuple[str, ...], folder: Path) -> list[Path]:
    """One wheel for each requirement, without its dependencies."""
    flags = [word for minor in GLIBCS for word in ("--platform", f"manylinux_2_{minor}_x86_64")]
    flags += [
        word for tag in ("2014", "2010", "1") for word in ("--platform", f"manylinux{tag}_x86_64")
    ]
    flags += [
        "--abi",
        "cp312",
        "--abi",
        "abi3",
        "--abi",
        "none",
        "--implementation",
        "cp",
        "--python-version",
        "3.12",
    ]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--only-binary=:all:",
        *flags,
    ]
    for requirement in requirements:
        subprocess.run([*command, "-d", str(folder), requirement], check=True)
    return sorted(folder.glob("*.whl"))


def unpack(wheels: list[Path], site: Path, wanted: tuple[str, ...] = ("",)) -> None:
    """Unzip the members whose names contain one of `wanted`."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(
                site, [name for name in archive.namelist() if any(part in name for part in wanted)]
            )


def pack_kernels(target: Path, work: Path) -> None:
    """Write the kernel libraries as one archive of a folder `site`."""
    shutil.rmtree(work, ignore_errors=True)
    site = work / "site"
    site.mkdir(parents=True)
    unpack(download(KERNELS + PURE + SERVER, work / "wheels"), site)
    unpack(download((VLLM,), work / "vllm"), site, WANTED_OF_VLLM)
    (site / "vllm" / "__init__.py").touch()
    subprocess.run(f"tar -C {work} -cf - site | xz -T2 -3 > {target}", shell=True, check=True)
    shutil.rmtree(work)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--wheels", action="store_true", help="leave the kernel libraries as they are"
    )
    asked = parser.parse_args()
    build_wheels(asked.out / "wheels")
    if not asked.wheels:
        pack_kernels(asked.out / "pack.tar.xz", asked.out / "work")


if __name__ == "__main__":
    main()
