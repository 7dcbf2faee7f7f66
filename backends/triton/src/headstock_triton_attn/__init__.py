"""The attention backend `triton`: one Triton kernel over pages, for CUDA."""

from __future__ import annotations

from headstock_triton_attn.plugin import spec

__all__ = ["spec"]
