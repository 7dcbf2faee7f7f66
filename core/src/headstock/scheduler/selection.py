"""Select the rows of a step: ask the scheduler plugin, and give its rows the pages they need."""

from __future__ import annotations

from functools import partial

import numpy as np

from headstock.errors import (
    PLUGIN_FAILURES,
    PluginBroken,
    describe_error,
    describe_type,
    shorten,
)
from headstock.scheduler.admission import admit_requests
from headstock.scheduler.chunks import align_chunks
from headstock.scheduler.page_pool import append_pages, count_available_pages
from headstock.scheduler.preemption import preempt_row, preempt_until_fits
from headstock.scheduler.row_counters import (
    NONE,
    RowCounter,
    any_set,
    count_drafts,
    count_waits,
    find_decode_rows,
    indices,
    read_only,
)
from headstock.scheduler.state import State
from headstock.scheduler.waiting_queue import WaitingQueue
from headstock.spi.arrays import Ints
from headstock.spi.scheduler import Budget, RequestColumns, ScheduleDecision, View

MAX_ASK_AGAIN_MS = 10_000
"""The longest that a scheduler is not asked: a slip in it must not look like a hang for long."""
BLAME = "report it to its author or pick another scheduler (--scheduler)"


def select_rows(state: State) -> Ints:
    """Return how many tokens each row computes; their pages are in the page tables.

    Waiting requests are admitted here.
    returns: [rows] int32
    """
    limits = state.limits
    free_rows = limits.max_rows - len(state.rows_by_priority)
    view = _make_view(state, state.waiting, free_rows)
    tokens = _count_step_tokens(state, view.num_new_tokens)
    budget = Budget(
        tokens=tokens,
        free_rows=free_rows,
        pages=tuple([count_available_pages(state, group) for group in range(len(limits.groups))]),
        page_size=limits.page_size,
        is_bounded=tokens < limits.max_batch_tokens,
    )
    decision = _call_scheduler(state, view, budget)
    num_scheduled, total = _validate_decision(state, view, budget, decision)
    if decision.ask_again_ms is not None:
        state.next_ask = state.milliseconds + min(int(decision.ask_again_ms), MAX_ASK_AGAIN_MS)
    preempted = state.num_preempted
    # Victims go first: the scheduled rows may need their pages.
    for row in decision.victims.tolist():
        preempt_row(state, row)
    # As many tokens as rows: each has one.
    aligned = align_chunks(state, num_scheduled, budget.tokens)
    is_decode = total == len(decision.rows) and aligned is num_scheduled
    num_scheduled = _allocate_pages(state, aligned, is_decode=is_decode)
    # Rows preempted since the decision are in the queue now, so positions in it no longer stand.
    if not len(decision.admit) or state.num_preempted != preempted:
        return num_scheduled
    admit_requests(state, decision.admit, budget.tokens - int(num_scheduled.sum()), num_scheduled)
    if any_set(num_scheduled) or not any_set(view.num_new_tokens):
        return num_scheduled
    # The scheduler held rows back for requests that did not fit. Without a second decision, no row
    # would run, no page would become free, and the next step would be the same.
    decision = _call_scheduler(state, _make_view(state, WaitingQueue(), 0), budget)
    num_scheduled, _ = _validate_decision(state, view, budget, decision)
    return _allocate_pages(state, align_chunks(state, num_scheduled, budget.tokens))


def _make_view(state: State, queue: WaitingQueue, free_rows: int) -> View:
    """Return the view that a scheduler plugin gets, with the first `free_rows` of the queue."""
    waiting = queue.first(free_rows)
    # Views of the live arrays spare the copies; read-only, so that no plugin writes the state.
    counters = read_only(state.row_counters.view())
    state.rows_by_priority.setflags(write=False)
    computed = counters[RowCounter.NUM_COMPUTED]
    num_new_tokens = np.minimum(counters[RowCounter.NUM_TOKENS], counters[RowCounter.LAST_POSITION])
    num_new_tokens -= computed
    num_drafts = state.limits.no_drafts
    # The next token depends on one that is still in flight, or drafts will follow that one.
    if state.num_special or state.may_draft:
        waits = counters[RowCounter.WAIT_FOR_SAMPLE] | counters[RowCounter.HELD]
        num_new_tokens[(waits & counters[RowCounter.NUM_PLACEHOLDERS]) > 0] = 0
    if state.may_draft:
        num_drafts = read_only(np.minimum(count_drafts(counters), num_new_tokens))
    num_new_tokens.setflags(write=False)
    return View(
        rows_by_priority=state.rows_by_priority,
        num_new_tokens=num_new_tokens,
        num_computed_tokens=computed,
        num_prompt_tokens=counters[RowCounter.NUM_PROMPT],
        last_step=counters[RowCounter.LAST_STEP],
        num_drafts=num_drafts,
        waiting_lengths=_read_only_ints([len(entry.tokens) for entry in waiting])
        if waiting
        else NONE,
        waiting_priorities=_read_only_ints([entry.request.priority for entry in waiting])
        if waiting
        else NONE,
        list_running=partial(_list_running, state),
        list_waiting=partial(_list_waiting, queue, state.milliseconds),
        step=state.num_steps,
    )


def _list_running(state: State) -> RequestColumns:
    """Return what the rows' requests ask for, [rows], zeros in free rows."""
    counters = state.row_counters.view()
    counters.setflags(write=False)
    num_prompt = counters[RowCounter.NUM_PROMPT]
    # A request that samples ends with a token that is never computed; one that pools has none.
    samples = counters[RowCounter.ACTIVE] - counters[RowCounter.POOLING]
    max_tokens = counters[RowCounter.LAST_POSITION] + samples - num_prompt
    waits = count_waits(counters, state.milliseconds)
    for column in (max_tokens, waits):
        column.setflags(write=False)
    return RequestColumns(
        lengths=counters[RowCounter.NUM_KNOWN],
        num_prompt_tokens=num_prompt,
        max_tokens=max_tokens,
        priorities=counters[RowCounter.PRIORITY],
        users=counters[RowCounter.USER],
        adapters=counters[RowCounter.ADAPTER],
        waits=waits,
    )


def _list_waiting(queue: WaitingQueue, milliseconds: int) -> RequestColumns:
    """Return what the requests of the queue ask for, [waiting]."""
    columns = queue.columns
    columns[-1] = np.clip(milliseconds - columns[-1], 0, np.iinfo(np.int32).max)
    columns = columns.astype(np.int32)
    columns.setflags(write=False)
    lengths, num_prompt_tokens, max_tokens, priorities, users, adapters, waits = columns
    return RequestColumns(
        lengths=lengths,
        num_prompt_tokens=num_prompt_tokens,
        max_tokens=max_tokens,
        priorities=priorities,
        users=users,
        adapters=adapters,
        waits=waits,
    )


def _read_only_ints(values: list[int]) -> Ints:
    """Return the values as a read-only array."""
    return read_only(np.array(values, np.int32))


def _count_step_tokens(state: State, num_new_tokens: Ints) -> int:
    """Return the token budget, lower where prompts are bounded.

    num_new_tokens: [rows]
    """
    most = state.limits.max_batch_tokens
    if state.pace is None:
        return most
    # Free rows pass for decode rows, but have no new tokens.
    num_decoded = int(num_new_tokens[find_decode_rows(state.row_counters)].sum())
    if not (num_decoded or state.pace.every_step):
        return most
    # Fewer would be no chunk of any prompt.
    return min(most, num_decoded + max(state.pace.prompt_tokens, state.limits.alignment))


def _call_scheduler(state: State, view: View, budget: Budget) -> ScheduleDecision:
    """Return the decision of the scheduler plugin.

    raises: PluginBroken, naming the plugin, when it raises or returns something else
    """
    limits = state.limits
    try:
        decision = limits.schedule(view, budget)
    except PLUGIN_FAILURES as error:
        raise PluginBroken(
            f"the scheduler {limits.scheduler!r} raised {describe_error(error)}; {BLAME}"
        ) from error
    if not isinstance(decision, ScheduleDecision):
        raise PluginBroken(
            f"the scheduler {limits.scheduler!r}: expected a ScheduleDecision, got "
            f"{shorten(decision)}; {BLAME}"
        )
    return decision


def _validate_decision(
    state: State, view: View, budget: Budget, decision: ScheduleDecision
) -> tuple[Ints, int]:
    """Return the scheduled tokens by row, [rows] int32, 0 where a row does not run, and their sum.

    raises: PluginBroken, naming the scheduler and the rule, when the decision breaks one
    """
    num_scheduled, total = np.zeros(state.limits.max_rows, np.int32), 0
    fault = _find_wrong_type(decision)
    if fault:
        pass
    elif len(decision.rows) != len(decision.counts):
        fault = f"{len(decision.rows)} rows but {len(decision.counts)} counts"
    elif len(decision.rows):
        try:
            num_scheduled[decision.rows] = decision.counts
        except IndexError:
            fault = "a row that does not exist"
        if np.count_nonzero(num_scheduled) != len(decision.rows):
            fault = fault or "a row twice, or for no tokens"
        elif any_set(
            num_scheduled.view(np.uint32) > view.num_new_tokens.view(np.uint32)
        ):  # a negative count is a huge one
            fault = "a row that is free or has fewer new tokens"
        elif (total := int(np.add.reduce(num_scheduled))) > budget.tokens:
            fault = f"{total} tokens of {budget.tokens}"
    if fault:
        pass
    elif len(decision.admit) and not _are_valid_positions(decision.admit, len(state.waiting)):
        fault = "waiting positions that are not in ascending order or do not exist"
    elif (
        len(decision.victims)
        and not np.isin(decision.victims, np.setdiff1d(view.rows_by_priority, decision.rows)).all()
    ):
        fault = "a victim that is free or scheduled to run"
    if fault:
        raise PluginBroken(f"the scheduler {state.limits.scheduler!r} chose {fault}; {BLAME}")
    return num_scheduled, total


def _find_wrong_type(decision: ScheduleDecision) -> str:
    """Describe a field of the decision that is not of its type; empty when all are."""
    # Lists that numpy takes for arrays would work here and fail there, and fractions would be cut.
    if (
        type(decision.rows) is np.ndarray
        and type(decision.counts) is np.ndarray
        and type(decision.admit) is np.ndarray
        and type(decision.victims) is np.ndarray
        and decision.counts.dtype.kind in "iu"
        and (decision.admit.dtype.kind in "iu" or not len(decision.admit))
        and (decision.victims.dtype.kind in "iu" or not len(decision.victims))
        and decision.ask_again_ms is None
    ):
        return ""
    for name in ("rows", "counts", "admit", "victims"):
        value = getattr(decision, name)
        if not isinstance(value, np.ndarray):
            return f"{name}: expected a numpy array of int32, got {describe_type(value)}"
        if value.dtype.kind not in "iu":
            return f"{name}: expected int32, got {value.dtype}"
    wait = decision.ask_again_ms
    if wait is None or (isinstance(wait, int | np.integer) and not isinstance(wait, bool)):
        return (
            ""
            if wait is None or wait > 0
            else f"ask_again_ms: expected 1 or more, or None, got {wait}"
        )
    return f"ask_again_ms: expected an int or None, got {describe_type(wait)}"


def _are_valid_positions(positions: Ints, count: int) -> bool:
    """Return whether the positions ascend within [0, count)."""
    values: list[int] = positions.tolist()
    return values[0] >= 0 and values[-1] < count and values == sorted(set(values))


def _allocate_pages(state: State, num_scheduled: Ints, *, is_decode: bool = False) -> Ints:
    """Append the pages that the scheduled rows need, by preemption when the pool is full.

    is_decode: whether no row computes more than one token
    num_scheduled: [rows]    returns: [rows], the tokens of each row that still runs
    """
    page_tokens = state.limits.page_token_column
    stops = state.row_counters[RowCounter.NUM_COMPUTED] + num_scheduled
    short = stops > state.spans * page_tokens
    if not any_set(short):
        return num_scheduled
    # All groups are checked before pages are taken from any, so nothing has to be put back.
    needs = []
    for group in range(len(short)):
        rows, spans = indices(short[group]), state.spans[group]
        if is_decode:
            # Its other tokens have pages, so a row lacks one at most: 2 us less than to divide.
            counts = state.limits.ones[: len(rows)]
            total = len(rows)
        else:
            counts = -(-stops.take(rows) // state.limits.page_tokens[group]) - spans.take(rows)
            total = sum(counts.tolist())  # few rows lack a page: 1 us less than the array's sum
        if total > state.num_free[group] and total > count_available_pages(state, group):
            fewer = _leave_out_drafts(state, num_scheduled)
            if fewer is not num_scheduled:
                return _allocate_pages(state, fewer)
            return preempt_until_fits(state, num_scheduled, -(-stops // page_tokens) - state.spans)
        needs.append((rows, counts, total))
    for group, (rows, counts, total) in enumerate(needs):
        if total:
            append_pages(state, group, rows, counts, total)
    return num_scheduled


def _leave_out_drafts(state: State, num_scheduled: Ints) -> Ints:
    """Return how many tokens the rows compute without drafts; the same array without drafts.

    num_scheduled, returns: [rows]
    """
    # A draft does not justify preempting a row, which would recompute its tokens.
    # The token before the drafts is computed in any case.
    drafts = np.minimum(count_drafts(state.row_counters), np.maximum(num_scheduled - 1, 0))
    return num_scheduled - drafts if any_set(drafts) else num_scheduled
