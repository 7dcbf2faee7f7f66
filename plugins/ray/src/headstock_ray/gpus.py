"""GPUs by the names that Ray has for them."""

from __future__ import annotations

from collections.abc import Mapping

from headstock.errors import CannotRun, shorten


def find_visible_gpu(gpu: str, variables: Mapping[str, str]) -> int:
    """The number that a GPU of this node has in this process.   raises: CannotRun"""
    visible = variables.get("CUDA_VISIBLE_DEVICES")
    names = None if visible is None else [name.strip() for name in visible.split(",")]
    if names is None and gpu.isdecimal():
        return int(gpu)
    if names is not None and gpu in names:
        return names.index(gpu)
    raise CannotRun(
        f"Ray has given rank 0 the GPU {shorten(gpu)}, which CUDA_VISIBLE_DEVICES "
        f"{shorten(visible)!r} hides from this process; start Ray and headstock with the same"
    )
