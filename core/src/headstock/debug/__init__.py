"""Injected faults, and the canary that finds writes to free pages."""

from __future__ import annotations

__all__ = ["canary", "fault_injection"]
