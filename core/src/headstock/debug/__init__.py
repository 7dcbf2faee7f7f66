"""What `--debug` flags check of a running engine, and the canary of free pages."""

from __future__ import annotations

__all__ = ["canary"]
