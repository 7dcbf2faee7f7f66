"""What paged attention backends share: their plans, and rows at fixed addresses."""

from __future__ import annotations

__all__ = ["device", "merge", "paged_plan", "static_rows"]
