"""The attention backend `fi`: FlashInfer over pages, for CUDA."""

from __future__ import annotations

from headstock_fi.plugin import spec

__all__ = ["spec"]
