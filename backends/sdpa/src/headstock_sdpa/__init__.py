"""The attention backend `sdpa`: plain torch, for any device."""

from __future__ import annotations

from headstock_sdpa.plugin import spec

__all__ = ["spec"]
