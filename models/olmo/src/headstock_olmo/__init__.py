"""OLMo-2 models for headstock."""

from __future__ import annotations

from headstock_olmo.plugin import olmo2

__all__ = ["olmo2"]
