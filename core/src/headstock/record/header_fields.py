"""What the fields of a recording's header may hold. A recording is a file from anywhere, so each
one is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from attrs import frozen

from headstock.errors import shorten

LARGEST = 2**31 - 1
MOST_ROWS = 1 << 20
MOST_PAGES = 1 << 27
MOST_GROUPS = 1 << 10
MOST_CELLS = 1 << 31
"""Entries of a replay's token and page tables together: eight times what 4,096 requests of 65,536
tokens take.
"""


@frozen
class Rule:
    """What a value must be, in words and as a test."""

    wanted: str
    holds: Callable[[Any], bool]

    def check(self, name: str, value: object) -> None:
        """Raise ValueError when the value is something else."""
        if not self.holds(value):
            raise ValueError(f"{name} is {shorten(repr(value))}, wanted {self.wanted}")


def whole(least: int, most: int) -> Rule:
    """An integer between two limits."""
    return Rule(
        f"an integer from {least} to {most}",
        lambda value: type(value) is int and least <= value <= most,
    )


def several(rule: Rule, least: int, most: int) -> Rule:
    """A list of values under one rule."""

    def holds(value: Any) -> bool:
        return (
            isinstance(value, list) and least <= len(value) <= most and all(map(rule.holds, value))
        )

    return Rule(f"a list of {least} to {most}, each {rule.wanted}", holds)


def optional(rule: Rule) -> Rule:
    """A value under a rule, or none."""
    return Rule(f"{rule.wanted}, or null", lambda value: value is None or rule.holds(value))


TEXT = Rule("a text", lambda value: isinstance(value, str))
SWITCH = Rule("true or false", lambda value: isinstance(value, bool))
SIZE = whole(1, LARGEST)

HEADER: Mapping[str, Rule] = MappingProxyType(
    {
        "headstock": TEXT,
        "model": TEXT,
        "limits": Rule("an object", lambda value: isinstance(value, dict)),
        "groups": several(Rule("an object", lambda value: isinstance(value, dict)), 1, MOST_GROUPS),
        "scheduler": TEXT,
        "cache": optional(TEXT),
        "options": several(TEXT, 0, LARGEST),
        "prefix_cache_n": optional(whole(0, LARGEST)),
        "first": whole(0, 2**63 - 1),
    }
)
LIMITS: Mapping[str, Rule] = MappingProxyType(
    {
        "max_rows": whole(1, MOST_ROWS),
        "max_batch_tokens": SIZE,
        "max_len": SIZE,
        "page_size": SIZE,
        "num_pages": several(whole(1, MOST_PAGES), 1, MOST_GROUPS),
        "scheduler": TEXT,
        "recompute": SWITCH,
        "most_regions": whole(0, LARGEST),
        "overlap": SWITCH,
        "check": SWITCH,
    }
)
GROUP: Mapping[str, Rule] = MappingProxyType(
    {
        "layers": several(whole(0, LARGEST), 0, LARGEST),
        "kind": Rule("full, window or state", lambda value: value in ("full", "window", "state")),
        "kv_heads": SIZE,
        "head_dim": SIZE,
        "window": optional(SIZE),
    }
)


def check_header(header: Mapping[str, Any]) -> None:
    """Raise ValueError for a field that is missing, unknown, of a wrong type or of an absurd
    size.
    """
    check_fields(header, HEADER, "", others=True)  # later versions may say more
    limits, groups = header["limits"], header["groups"]
    check_fields(limits, LIMITS, "limits.")
    for number, group in enumerate(groups):
        check_fields(group, GROUP, f"groups[{number}].")
    if len(limits["num_pages"]) != len(groups):
        raise ValueError(
            f"limits.num_pages has {len(limits['num_pages'])} entries, wanted one a group: "
            f"{len(groups)}"
        )
    columns = -(-limits["max_len"] // limits["page_size"])
    cells = limits["max_rows"] * columns * (limits["page_size"] + len(groups))
    if cells > MOST_CELLS or sum(limits["num_pages"]) > MOST_PAGES:
        raise ValueError(
            f"its sizes need tables of {cells} entries and {sum(limits['num_pages'])} pages, "
            f"wanted at most {MOST_CELLS} and {MOST_PAGES}"
        )


def check_fields(
    values: Mapping[str, Any], rules: Mapping[str, Rule], where: str, *, others: bool = False
) -> None:
    """Raise ValueError when a field is missing or breaks its rule, or is not among the rules."""
    if missing := sorted(rules.keys() - values.keys()):
        raise ValueError(f"it lacks {', '.join(where + name for name in missing)}")
    if not others and (unknown := sorted(values.keys() - rules.keys())):
        raise ValueError(f"{where}{shorten(unknown[0])} is no field of this version")
    for name, rule in rules.items():
        rule.check(where + name, values[name])
