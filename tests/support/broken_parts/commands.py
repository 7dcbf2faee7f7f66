"""Commands that are each wrong in one way."""

from __future__ import annotations

from typing import Any

NOT_A_FUNCTION = "main"


def raises(arguments: list[str]) -> int:
    return {"port": 80}[arguments[0]]


def returns_none(arguments: list[str]) -> Any:
    return None
