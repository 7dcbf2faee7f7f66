"""LFM2 models for headstock."""

from __future__ import annotations

from headstock_lfm2.plugin import lfm2

__all__ = ["lfm2"]
