"""The values that the fields of a recording's header may have.

A recording may come from anyone, so every field is checked before tables of its sizes are made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from attrs import frozen

from headstock.errors import shorten
from headstock.scheduler.limits import MAX_DRAFTS
from headstock.spi import LayoutKind

LARGEST = 2**31 - 1
MAX_ROWS = 1 << 20
MAX_PAGES = 1 << 27
MAX_GROUPS = 1 << 10
LAYOUTS = tuple(kind.value for kind in LayoutKind)
MAX_CELLS = 1 << 31
"""Most entries of a replay's token and page tables together: eight times those of 4,096 requests
of 65,536 tokens.
"""


@frozen
class FieldRule:
    """A condition on a value, in words and as a predicate."""

    condition: str
    holds: Callable[[Any], bool]

    def check(self, name: str, value: object) -> None:
        """Raise ValueError when the value is something else."""
        if not self.holds(value):
            raise ValueError(f"{name}: expected {self.condition}, got {shorten(repr(value))}")


def _integer(least: int, most: int) -> FieldRule:
    """Return the rule for an integer from `least` to `most`."""
    return FieldRule(
        f"an integer from {least} to {most}",
        # not isinstance: True is an int too
        lambda value: type(value) is int and least <= value <= most,
    )


def _list_of(rule: FieldRule, least: int, most: int) -> FieldRule:
    """Return the rule for a list whose values follow one rule."""

    def holds(value: Any) -> bool:
        return (
            isinstance(value, list) and least <= len(value) <= most and all(map(rule.holds, value))
        )

    return FieldRule(f"a list of {least} to {most}, each {rule.condition}", holds)


def _optional(rule: FieldRule) -> FieldRule:
    """Return the rule for a value that may be null."""
    return FieldRule(f"{rule.condition}, or null", lambda value: value is None or rule.holds(value))


TEXT = FieldRule("a text", lambda value: isinstance(value, str))
SWITCH = FieldRule("true or false", lambda value: isinstance(value, bool))
SIZE = _integer(1, LARGEST)

HEADER_RULES: Mapping[str, FieldRule] = MappingProxyType(
    {
        "headstock": TEXT,
        "model": TEXT,
        "limits": FieldRule("an object", lambda value: isinstance(value, dict)),
        "groups": _list_of(
            FieldRule("an object", lambda value: isinstance(value, dict)), 1, MAX_GROUPS
        ),
        "scheduler": TEXT,
        "cache": _optional(TEXT),
        "options": _list_of(TEXT, 0, LARGEST),
        "prefix_cache_n": _optional(_integer(0, LARGEST)),
        "first": _integer(0, 2**63 - 1),
    }
)
LIMIT_RULES: Mapping[str, FieldRule] = MappingProxyType(
    {
        "max_rows": _integer(1, MAX_ROWS),
        "max_batch_tokens": SIZE,
        "max_len": SIZE,
        "page_size": SIZE,
        "num_pages": _list_of(_integer(1, MAX_PAGES), 1, MAX_GROUPS),
        "scheduler": TEXT,
        "recompute": SWITCH,
        "max_regions": _integer(0, LARGEST),
        "overlap": SWITCH,
        "max_drafts": _integer(0, MAX_DRAFTS),
        "alignment": SIZE,
        "snapshot_tokens": _integer(0, LARGEST),
        "check": SWITCH,
    }
)
NEWER_LIMITS: Mapping[str, Any] = MappingProxyType({"alignment": 1, "snapshot_tokens": 0})
"""Limits that recordings made before they existed lack, as they were."""
GROUP_RULES: Mapping[str, FieldRule] = MappingProxyType(
    {
        "layers": _list_of(_integer(0, LARGEST), 0, LARGEST),
        # The scheduler counts tokens and pages, whatever is in them.
        "layout": FieldRule("full, latent or state", lambda value: value in LAYOUTS),
        "window": _optional(SIZE),
    }
)


def check_header(header: Mapping[str, Any]) -> None:
    """Raise ValueError for a field that is missing, unknown, mistyped or absurdly large."""
    _check_fields(header, HEADER_RULES, "", others=True)  # later versions may say more
    limits, groups = header["limits"], header["groups"]
    _check_fields({**NEWER_LIMITS, **limits}, LIMIT_RULES, "limits.")
    for number, group in enumerate(groups):
        _check_fields(group, GROUP_RULES, f"groups[{number}].")
    if len(limits["num_pages"]) != len(groups):
        raise ValueError(
            f"limits.num_pages: expected one entry for each of {len(groups)} groups, got "
            f"{len(limits['num_pages'])}"
        )
    columns = -(-limits["max_len"] // limits["page_size"])
    cells = limits["max_rows"] * columns * (limits["page_size"] + len(groups))
    if cells > MAX_CELLS or sum(limits["num_pages"]) > MAX_PAGES:
        raise ValueError(
            f"its sizes: expected tables of at most {MAX_CELLS} entries and {MAX_PAGES} pages, got "
            f"{cells} and {sum(limits['num_pages'])}"
        )


def _check_fields(
    values: Mapping[str, Any], rules: Mapping[str, FieldRule], where: str, *, others: bool = False
) -> None:
    """Raise ValueError when a field is missing or breaks its rule, or is not among the rules."""
    if missing := sorted(rules.keys() - values.keys()):
        raise ValueError(f"it lacks {', '.join(where + name for name in missing)}")
    if not others and (unknown := sorted(values.keys() - rules.keys())):
        raise ValueError(f"{where}{shorten(unknown[0])} is not a field of this version")
    for name, rule in rules.items():
        rule.check(where + name, values[name])
