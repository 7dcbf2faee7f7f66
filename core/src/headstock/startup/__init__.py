"""From a configuration and the selected parts to an engine's: load, measure, size, assemble."""

from __future__ import annotations

__all__ = ["build", "device", "operation_tuning", "summary", "tuned_choices", "tuning_subject"]
