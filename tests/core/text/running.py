"""`headstock run` in this process, over a scripted engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Run = Callable[..., tuple[int, str, str]]
"""Runs `headstock run ARGUMENTS` with standard input from bytes; the exit code, output and errors.
"""


def hello(request: Any) -> list[int]:
    """Says the prompt again, then ends."""
    return [*map(int, request.prompt), 0]
