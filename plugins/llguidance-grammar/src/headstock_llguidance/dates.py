"""Hold the dates of a JSON schema to the calendar: to llguidance each year has a 29 February."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

DATES: Final = ("date", "date-time")
_LEAP = r"\d\d(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00"
PATTERNS: Final = (
    rf"^(\d{{4}}-(0[13-9]|1[0-2])-\d\d|\d{{4}}-02-([01]\d|2[0-8])|({_LEAP})-02-29)",
    # Year 0, which many languages' dates do not have.
    r"^(\d{3}[1-9]|\d\d[1-9]\d|\d[1-9]\d\d|[1-9]\d{3})-",
)
"""What a date of a format must match beside it."""
MAPS: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
VALUES: Final = ("const", "enum", "default", "examples")
"""Keywords that hold schemas by name, and those that hold no schemas."""


def hold_to_calendar(schema: Any) -> Any:
    """The schema, whose dates are days that exist."""
    try:
        return _hold(schema, is_map=False)
    except RecursionError:  # llguidance says how deep a schema may be
        return schema


def hold_text_to_calendar(text: str) -> str:
    """The same for a schema as JSON; text without dates stays as it is."""
    if '"date' not in text:
        return text
    try:
        return json.dumps(hold_to_calendar(json.loads(text)), ensure_ascii=False)
    except RecursionError:
        return text


def _hold(schema: Any, *, is_map: bool) -> Any:
    """See `hold_to_calendar`; `is_map` is for schemas by name."""
    if isinstance(schema, list):
        return [_hold(each, is_map=False) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    held = {
        name: value
        if name in VALUES and not is_map
        else _hold(value, is_map=name in MAPS and not is_map)
        for name, value in schema.items()
    }
    others = schema.get("allOf", [])
    # llguidance says what is wrong where `allOf` is no list.
    if not is_map and schema.get("format") in DATES and isinstance(others, list):
        held["allOf"] = [*held.get("allOf", ()), *({"pattern": each} for each in PATTERNS)]
    return held
