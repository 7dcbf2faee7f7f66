"""Admit waiting requests to free rows."""

from __future__ import annotations

import numpy as np

from headstock.scheduler.chunks import end_chunk
from headstock.scheduler.contiguous import Region, match_region
from headstock.scheduler.page_pool import (
    append_row_pages,
    copy_row_pages,
    count_available_pages,
    reuse_region,
    share_prefix,
)
from headstock.scheduler.policy_answers import check_match, read_only_keys
from headstock.scheduler.prefix_wait import PrefixWait, joins_prefix_wait, must_wait_for_prefix
from headstock.scheduler.request import RequestState
from headstock.scheduler.row_counters import (
    NONE,
    NUM_COUNTERS,
    RowCounter,
    indices,
    is_special,
    wrap_milliseconds,
)
from headstock.scheduler.snapshots import mark_snapshots
from headstock.scheduler.state import State
from headstock.spi.arrays import Ints
from headstock.spi.cache import Match


def sort_rows(state: State) -> None:
    """Bring `rows_by_priority` up to date after requests were admitted."""
    if not state.rows_unsorted:
        return
    request_states = [
        state.requests_by_row[row]
        for row in (*state.rows_by_priority[-1:].tolist(), *state.new_row_ids)
    ]
    keys = [
        request_state.priority_key for request_state in request_states if request_state is not None
    ]
    rows = np.concatenate((state.rows_by_priority, np.array(state.new_row_ids, np.int32)))
    if keys != sorted(keys):  # rare: new rows mostly sort last, and this takes 15 us
        priorities, arrivals = (
            state.row_counters[RowCounter.PRIORITY].take(rows),
            state.row_counters[RowCounter.ARRIVAL].take(rows),
        )
        rows = rows[np.lexsort((arrivals, -priorities))]
    state.rows_by_priority = rows
    state.rows_unsorted = False


def admit_requests(state: State, positions: Ints, budget: int, num_scheduled: Ints) -> None:
    """Admit the waiting requests at `positions`, in that order, while tokens and pages last.

    A request whose next page a running row is computing waits; those behind it go ahead.
    writes: num_scheduled [rows], the tokens that each admitted row computes in this step
    """
    # Read once: the queue changes only at the end, so that `positions` stay valid.
    request_states = state.waiting.pick(positions.tolist())
    admitted: set[int] = set()
    prefix_waits: list[PrefixWait] = []
    free_rows = indices(state.row_counters[RowCounter.ACTIVE] == 0).tolist()
    for request_state in request_states:
        if budget <= 0 or not free_rows:
            break
        if joins_prefix_wait(request_state, prefix_waits):
            continue
        prefix_hit = match_prefix(state, request_state)
        if must_wait_for_prefix(
            state, request_state, count_prefix_tokens(state, prefix_hit), prefix_waits
        ):
            continue
        # No smaller request goes ahead: a stream of those would starve one that needs many pages.
        if not has_room(state, request_state, prefix_hit):
            break
        cached = count_prefix_tokens(state, prefix_hit)
        if budget < min(state.limits.alignment, len(request_state.tokens) - cached):
            break  # its first chunk would be empty
        row = free_rows.pop(0)
        num_scheduled[row] = count = _place_in_row(state, request_state, row, prefix_hit, budget)
        state.new_row_ids.append(row)
        admitted.add(request_state.arrival)
        budget -= count
    if admitted:
        state.waiting = state.waiting.without(admitted)
        state.rows_unsorted = True


def _place_in_row(
    state: State,
    request_state: RequestState,
    row: int,
    prefix_hit: Match | Region | None,
    budget: int,
) -> int:
    """Give the request the row, its prefix hit, and pages for the tokens of this step.

    returns: how many tokens it computes in this step
    """
    cached = count_prefix_tokens(state, prefix_hit)
    init_row(state, request_state, row, cached)
    if isinstance(prefix_hit, Region):
        reuse_region(state, row, prefix_hit)
    elif prefix_hit is not None:
        share_prefix(state, row, prefix_hit)
    # Pages are appended after that: a prefix that is held can no longer be evicted to make room.
    for group in state.limits.state_groups:
        missing = state.limits.state_pages - int(state.spans[group, row])
        if missing:
            append_row_pages(state, group, row, missing)
    if isinstance(prefix_hit, Match):
        mark_snapshots(state, row, prefix_hit)
    stop = min(len(request_state.tokens), cached + budget)
    if not state.limits.recompute:
        stop = end_chunk(state, row, cached, stop)
    for group, span in enumerate(state.spans[:, row].tolist()):
        pages = -(-stop // state.limits.page_tokens[group])
        if pages > span:
            append_row_pages(state, group, row, pages - span)
    return stop - cached


def match_prefix(state: State, request_state: RequestState) -> Match | Region | None:
    """Return the longest prefix that need not be computed, or None.

    The last token is left out of the search: its hidden state is needed, so it is computed.

    raises: PluginBroken
    """
    limits = state.limits
    takes_hits = request_state.request.takes_prefix_hits
    searched = request_state.tokens[:-1] if takes_hits else request_state.tokens[:0]
    if limits.policy is not None:
        keys = read_only_keys(searched)
        match = limits.policy.match_prefix(
            state.index, keys, request_state.request.prefix_namespace
        )
        return check_match(limits, match, len(keys))
    return match_region(state.regions, searched, request_state.request.prefix_namespace)


def count_prefix_tokens(state: State, prefix_hit: Match | Region | None) -> int:
    """Return how many tokens the prefix hit covers."""
    if isinstance(prefix_hit, Region):
        return len(prefix_hit.tokens)
    return prefix_hit.pages.shape[1] * state.limits.page_size if prefix_hit is not None else 0


def count_tokens_to_admit(state: State, request_state: RequestState) -> int:
    """Return for how many tokens a request needs room before it is admitted.

    These are its tokens and one page more, if it grows.
    """
    return min(
        len(request_state.tokens) + state.limits.page_size, request_state.request.max_computed
    )


def has_room(
    state: State,
    request_state: RequestState,
    prefix_hit: Match | Region | None,
    below: int | None = None,
) -> bool:
    """Return whether the request fits beside the pages that the running rows take next.

    Without that reserve a request admitted to the last free pages would be preempted at once.
    `below`: assume that every row of a lower priority than this were preempted.
    """
    counters, length = state.row_counters, count_tokens_to_admit(state, request_state)
    num_new_tokens = int(
        counters[RowCounter.NUM_TOKENS].sum() - counters[RowCounter.NUM_COMPUTED].sum()
    )
    # The other groups have a page for whatever the rows may hold.
    for group in state.limits.scarce_groups:
        if not state.limits.groups[group].retains_all:
            if can_reserve_pages(state, group, request_state.request.max_computed, below):
                continue
            return False
        need, num_available = (
            state.limits.max_pages(group, length),
            count_available_pages(state, group),
        )
        if (
            below is None
            and need + len(state.requests_by_row) + num_new_tokens // state.limits.page_size
            <= num_available
        ):
            continue  # enough even if each row lacks a page: skip the exact count
        if isinstance(prefix_hit, Region):
            # The region is the request's first page, and available pages count it already.
            need, num_available = need - 1, num_available - 1
        elif prefix_hit is not None:
            # Matched pages that someone holds cost nothing; the others stop being evictable.
            need -= int(np.count_nonzero(state.refs[group][prefix_hit.pages[group]]))
        staying = counters[RowCounter.ACTIVE] > 0
        if below is not None:
            preempted = staying & (counters[RowCounter.PRIORITY] < below)
            num_available += _count_freed_pages(state, group, indices(preempted), prefix_hit)
            staying &= ~preempted
        if need + count_missing_pages(state, group, staying) > num_available:
            return False
    return True


def can_reserve_pages(state: State, group: int, stop: int, below: int | None) -> bool:
    """Return whether a window or a state has pages for a row up to its end, beside the others.

    stop: tokens of the new row at its end    below: as in `has_room`
    """
    # The pages of a window come and go. Were rows admitted by what is free now, they would preempt
    # each other in turns; so each is admitted with the most that it will ever keep.
    limits, counters = state.limits, state.row_counters
    staying = counters[RowCounter.ACTIVE] > 0
    if below is not None:
        staying &= counters[RowCounter.PRIORITY] >= below
    page_tokens = limits.page_tokens[group]
    stops = np.append(counters[RowCounter.LAST_POSITION][staying], stop)
    if group in limits.state_groups:
        return len(stops) * limits.state_pages <= limits.num_pages[group]
    pages = -(-stops // page_tokens)
    kept = np.minimum(pages, limits.max_kept_pages[group])
    # All rows share the chunk of a step; each may have a page of it that is not full.
    in_step = -(-limits.max_batch_tokens // page_tokens) + len(stops)
    return int(kept.sum() + min(in_step, (pages - kept).sum())) <= limits.num_pages[group]


def count_missing_pages(state: State, group: int, staying: Ints) -> int:
    """Return how many pages the rows that stay lack for their tokens.

    A row that still grows counts for one page at least.
    staying: [rows] bool
    """
    limits, spans, counters = state.limits, state.spans[group], state.row_counters
    page_tokens = limits.page_tokens[group]
    growing = staying & (spans < -(-counters[RowCounter.LAST_POSITION] // page_tokens))
    pages = -(-counters[RowCounter.NUM_TOKENS] // page_tokens) - spans
    return int(np.clip(pages, 1, limits.max_pages(group, limits.max_len))[growing].sum())


def _count_freed_pages(
    state: State, group: int, rows: Ints, prefix_hit: Match | Region | None
) -> int:
    """Return how many pages only these rows hold, those of the prefix hit left out."""
    pages = np.concatenate([NONE, *(copy_row_pages(state, group, row) for row in rows.tolist())])
    refs = state.refs[group]
    # A shared page becomes free only when every row that holds it is preempted.
    alone = (np.bincount(pages, minlength=len(refs)) == refs) & (refs > 0)
    if isinstance(prefix_hit, Match):
        alone[prefix_hit.pages[group]] = False
    return int(np.count_nonzero(alone))


def init_row(state: State, request_state: RequestState, row: int, cached: int) -> None:
    """Write the request's counters, tokens and stop ids to the row."""
    request, length = request_state.request, len(request_state.tokens)
    prompt = len(request.prompt)
    state.num_admitted += 1
    values = [0] * NUM_COUNTERS
    values[RowCounter.ACTIVE] = 1
    values[RowCounter.ADMISSION_ID] = state.num_admitted
    values[RowCounter.NUM_TOKENS] = values[RowCounter.NUM_KNOWN] = length
    values[RowCounter.NUM_COMPUTED] = cached
    values[RowCounter.NUM_PROMPT] = prompt
    values[RowCounter.LAST_POSITION] = request.max_computed
    values[RowCounter.MIN_LEN] = prompt + request.min_tokens
    values[RowCounter.WAIT_FOR_SAMPLE] = int(request.wait_for_sample or state.limits.recompute)
    values[RowCounter.PROMPT_LOGPROBS] = int(request.prompt_logprobs)
    values[RowCounter.POOLING] = int(bool(request.pooling))
    # A preempted request may find its own output cached too; only the prompt counts.
    values[RowCounter.NUM_CACHED] = min(cached, prompt)
    values[RowCounter.PRIORITY] = request.priority
    values[RowCounter.LAST_STEP] = state.num_steps
    values[RowCounter.ARRIVAL] = request_state.arrival
    values[RowCounter.USER] = request_state.user
    values[RowCounter.ADAPTER] = request_state.adapter
    values[RowCounter.ARRIVED_AT] = wrap_milliseconds(request_state.arrived_at)
    state.row_counters[:, row] = values
    state.tokens[row, :length] = request_state.tokens
    state.requests_by_row[row] = request_state
    state.num_special += int(is_special(state.row_counters[:, row]))
    _set_stop_ids(state, row, request.stop_ids)


def _set_stop_ids(state: State, row: int, ids: tuple[int, ...]) -> None:
    """Write the row's stop ids; a table that is too narrow is widened."""
    width = len(state.stop_ids)
    if len(ids) > width:
        state.stop_ids = np.pad(state.stop_ids, ((0, len(ids) - width), (0, 0)), constant_values=-1)
    state.stop_ids[:, row] = -1
    state.stop_ids[: len(ids), row] = ids
