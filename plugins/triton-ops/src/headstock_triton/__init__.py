"""Operations as fused Triton kernels, for headstock."""

from __future__ import annotations

from headstock_triton.plugin import spec

__all__ = ["spec"]
