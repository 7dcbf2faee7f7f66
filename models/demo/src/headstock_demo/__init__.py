"""A small trained checkpoint that ships with headstock."""

from __future__ import annotations

from headstock_demo.plugin import spec

__all__ = ["spec"]
