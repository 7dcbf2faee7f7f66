"""From a configuration to an engine's parts: choose, check, negotiate, size, assemble."""

from __future__ import annotations

__all__ = ["auto_choices", "device", "summary", "tuned_choices"]
