"""Whether the kernels for Hopper can be had here. Nothing is imported that takes long."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from shutil import which

USUAL = Path("/usr/local/cuda")
"""Where FlashInfer looks for the CUDA toolkit if nothing says where it is."""


def has_kernels() -> bool:
    """Whether there is a compiler for them, or a kernel that was compiled before."""
    return _has_nvcc() or find_spec("flashinfer_jit_cache") is not None or _has_modules()


def _has_nvcc() -> bool:
    """Whether FlashInfer finds nvcc."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        return (Path(home) / "bin" / "nvcc").exists()
    return which("nvcc") is not None or (USUAL / "bin" / "nvcc").exists()


def _has_modules() -> bool:
    """Whether `build` has made one of XQA's modules."""
    package = find_spec("flashinfer")
    places = package.submodule_search_locations if package else None
    return any(
        next((Path(place) / "data" / "aot").glob("*xqa*"), None) is not None
        for place in places or ()
    )
