"""The grammar plugin `llguidance`."""

from __future__ import annotations

from headstock_llguidance.plugin import spec

__all__ = ["spec"]
