"""Which plugin serves what: those that are chosen, what each can do here, and what each refuses."""

from __future__ import annotations

__all__ = ["auto_choices"]
