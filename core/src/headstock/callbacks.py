"""Callbacks that the front door and the rooms behind it share; importing it costs nothing."""

from __future__ import annotations

from collections.abc import Callable

ProgressCallback = Callable[[str, int, int], None]
"""How far a stage is: its name, what is done, and the total."""
