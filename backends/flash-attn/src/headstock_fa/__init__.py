"""The attention backend `fa`: FlashAttention over pages, for CUDA."""

from __future__ import annotations

from headstock_fa.plugin import spec

__all__ = ["spec"]
