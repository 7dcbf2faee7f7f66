"""What `--debug` flags check of a running engine, the canary of free pages, injected faults."""

from __future__ import annotations

__all__ = ["canary", "fault_injection"]
