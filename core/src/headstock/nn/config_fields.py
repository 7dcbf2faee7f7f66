"""Typed reading of config.json. Errors name the field, its value and what was expected."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from headstock.errors import shorten

Json = Mapping[str, Any]


def read_positive(hf: Json, name: str, default: int | None = None) -> int:
    """The field, a whole number above 0; `default` where it is absent.   raises: ValueError"""
    value = read_whole(hf, name, default)
    if value < 1:
        raise ValueError(f"{name}: expected a number above 0, got {value}")
    return value


def read_whole(hf: Json, name: str, default: int | None = None) -> int:
    """The field, a whole number; `default` where it is absent.   raises: ValueError"""
    value = _read(hf, name, default)
    if type(value) is not int:
        raise ValueError(f"{name}: expected a whole number, got {quoted(value)}")
    return value


def read_number(hf: Json, name: str, default: float | None = None) -> float:
    """The field, a finite number above 0; `default` where it is absent.   raises: ValueError"""
    value = _read(hf, name, default)
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise ValueError(f"{name}: expected a number above 0, got {quoted(value)}")
    return float(value)


def read_flag(hf: Json, name: str, default: bool, *, may_be_null: bool = False) -> bool:
    """The field, true or false; `default` where it is absent, false for a null that may be.

    raises: ValueError
    """
    value = hf.get(name, default)
    if value is None and may_be_null:
        return False
    if type(value) is not bool:
        raise ValueError(f"{name}: expected true or false, got {quoted(value)}")
    return value


def read_bias(hf: Json, name: str, default: bool = False) -> bool:
    """Whether the field asks for a bias, and null for none; `default` where it is absent.

    raises: ValueError
    """
    # Older files have null. No mistake is silent: a stored bias that is not read is refused.
    return read_flag(hf, name, default, may_be_null=True)


def without_nulls(hf: Json, *names: str) -> Json:
    """`hf` without those of the named fields that are null, where null means absent."""
    return {name: value for name, value in hf.items() if value is not None or name not in names}


def quoted(value: object) -> str:
    """`value` as errors show it, at most 64 characters: JSON, but text as Python writes it."""
    return (
        shorten(json.dumps(value))
        if value is None or isinstance(value, bool | int | float)
        else repr(shorten(value))
    )


def _read(hf: Json, name: str, default: object) -> Any:
    if name not in hf and default is None:
        raise ValueError(f"{name} is missing")
    return hf.get(name, default)
