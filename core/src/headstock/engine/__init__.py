"""The engine: requests in, updates out, and the thread that steps it."""

from __future__ import annotations

__all__ = ["engine", "loop", "output_tracker", "stats", "step_events"]
