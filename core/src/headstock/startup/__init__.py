"""From a configuration and the selected parts to an engine's: load, measure, size, assemble."""

from __future__ import annotations

__all__ = ["device", "summary", "tuned_choices"]
