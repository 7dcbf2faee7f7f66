"""Check what a cache policy answers, before the pages of rows follow from it."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from headstock.errors import (
    PLUGIN_FAILURES,
    PluginBroken,
    describe_error,
    describe_type,
    shorten,
)
from headstock.scheduler.limits import Limits
from headstock.scheduler.row_counters import read_only
from headstock.scheduler.state import State
from headstock.spi.arrays import Ints
from headstock.spi.cache import CachePolicy, CacheStats, Match


def blame_policy(limits: Limits, fault: str) -> NoReturn:
    """Raise PluginBroken that names the cache plugin and what it did."""
    name = limits.cache or type(limits.policy).__name__
    raise PluginBroken(
        f"the cache plugin {name!r} {fault}; report it to its author or pick another "
        "cache_type (--cache-type)"
    )


def read_only_keys(tokens: Ints) -> Ints:
    """Return the tokens as a policy may read them: it gets the arrays of requests themselves."""
    return read_only(tokens.view())


def check_match(limits: Limits, match: object, num_keys: int) -> Match:
    """Return the match.

    num_keys: tokens that were searched for
    raises: PluginBroken when it cannot be one
    """
    if not isinstance(match, Match):
        blame_policy(limits, f"matched a prefix: expected a Match, got {describe_type(match)}")
    pages = match.pages
    if not _is_int_array(pages) or pages.ndim != 2 or len(pages) != len(limits.groups):
        found = f"pages of shape {pages.shape}" if _is_int_array(pages) else describe_type(pages)
        blame_policy(
            limits,
            f"matched a prefix: expected integers [{len(limits.groups)}, n], a row for each KV "
            f"group, got {found}",
        )
    count = pages.shape[1]
    if not count:
        return match
    if count * limits.page_size > num_keys:
        blame_policy(limits, f"matched {count} pages, and {num_keys} tokens were searched for")
    for group, (numbers, total) in enumerate(zip(pages, limits.num_pages, strict=True)):
        if group in limits.state_groups:
            numbers = numbers[-1:]
        least = 0 if limits.groups[group].window is not None else 1
        _check_numbers(limits, "matched", group, numbers, least, total)
    if limits.snapshot_tokens and count * limits.page_size % limits.snapshot_step:
        blame_policy(
            limits,
            f"matched {count} pages, and snapshots are at multiples of {limits.snapshot_step} "
            "tokens",
        )
    return match


def check_inserted(limits: Limits, answer: Any, own: Ints, num_rows: int) -> tuple[Ints, list[Any]]:
    """Return the canonical pages and the new handles.

    answer: of `insert_each`    own: [groups, n] int32, the pages that were inserted
    raises: PluginBroken
    """
    if type(answer) is tuple and len(answer) == 2:
        canonical, ends = answer
        is_list = isinstance(ends, list) and len(ends) == num_rows
        # Policies return `own` itself when no page was a duplicate, which is nearly always.
        if is_list and (canonical is own or _are_pages(limits, canonical, own)):
            return canonical, ends
    blame_policy(
        limits,
        f"answered an insertion of {own.shape[1]} pages: expected the pages that count, "
        f"{list(own.shape)}, and a handle for each of {num_rows} rows, got {shorten(answer, 80)}",
    )


def check_snapshot(limits: Limits, answer: Any, own: Ints) -> Ints:
    """Return the snapshots that the index has now.

    answer: of `add_snapshot`    own: [groups] int32, those that were added
    raises: PluginBroken
    """
    if isinstance(answer, np.ndarray) and _are_pages(limits, answer[:, None], own[:, None]):
        return answer
    blame_policy(
        limits,
        f"answered a snapshot: expected a page for each group that keeps a state, "
        f"{list(own.shape)}, got {shorten(answer, 80)}",
    )


def check_evicted(state: State, pages: Any) -> list[Ints]:
    """Return the pages that an index has dropped, by group.

    raises: PluginBroken for one that a row holds, that is free, or that does not exist
    """
    limits = state.limits
    if not isinstance(pages, list | tuple) or len(pages) != len(limits.groups):
        blame_policy(
            limits, f"evicted pages: expected one array for each KV group, got {shorten(pages, 80)}"
        )
    for group, numbers in enumerate(pages):
        if not _is_int_array(numbers) or numbers.ndim != 1:
            blame_policy(
                limits,
                f"evicted pages: expected a flat array of integers, got {shorten(numbers, 80)}",
            )
        _check_numbers(limits, "evicted", group, numbers, 1, limits.num_pages[group])
        if len(numbers) != len(set(numbers.tolist())):
            blame_policy(limits, f"evicted a page of KV group {group} twice")
        if state.refs[group][numbers].any():
            blame_policy(limits, "evicted a page that a running row holds")
    return list(pages)


def count_indexed(limits: Limits, policy: CachePolicy, index: Any) -> tuple[int, ...]:
    """Count the pages of an index by group, as the policy does.

    raises: PluginBroken when its `stats` raises or has no counts
    """
    try:
        stats = policy.stats(index)
    except PLUGIN_FAILURES as error:
        blame_policy(limits, f"raised {describe_error(error)} in stats")
    pages = stats.pages if isinstance(stats, CacheStats) else None
    if (
        not isinstance(pages, tuple)
        or len(pages) != len(limits.groups)
        or not all(isinstance(count, int | np.integer) for count in pages)
    ):
        blame_policy(
            limits,
            "answered stats: expected a CacheStats with the pages of each KV group, got "
            f"{shorten(stats, 80)}",
        )
    return pages


def _are_pages(limits: Limits, canonical: object, own: Ints) -> bool:
    """Whether the array has a page of the pool for each own one."""
    if not isinstance(canonical, np.ndarray) or canonical.dtype.kind not in "iu":
        return False
    if canonical.shape != own.shape or (canonical < 0).any():
        return False
    totals = np.array(limits.num_pages)[:, None]
    return bool((canonical <= totals).all()) and bool(((canonical > 0) == (own > 0)).all())


def _is_int_array(value: object) -> bool:
    """Whether the value is an array of integers."""
    return isinstance(value, np.ndarray) and value.dtype.kind in "iu"


def _check_numbers(
    limits: Limits, verb: str, group: int, numbers: Ints, least: int, total: int
) -> None:
    """Raise PluginBroken unless all numbers are pages of the group."""
    if len(numbers) and not least <= int(numbers.min()) <= int(numbers.max()) <= total:
        wrong = int(numbers.min()) if int(numbers.min()) < least else int(numbers.max())
        blame_policy(
            limits, f"{verb} page {wrong} of KV group {group}, which has pages 1 to {total}"
        )
