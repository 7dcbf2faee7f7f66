"""Make a plan of the scheduled tokens."""

from __future__ import annotations

import numpy as np

from headstock.scheduler.draft_states import follow_drafts
from headstock.scheduler.page_pool import expand_intervals
from headstock.scheduler.plan import Plan
from headstock.scheduler.row_counters import (
    NONE,
    RowCounter,
    all_set,
    any_set,
    count_drafts,
    indices,
)
from headstock.scheduler.snapshots import save_states
from headstock.scheduler.state import State
from headstock.spi.arrays import Ints


def make_plan(state: State, num_scheduled: Ints) -> Plan:
    """Make the plan of the scheduled rows, and advance their counters to the end of its step.

    num_scheduled: [rows]
    """
    counters = state.row_counters
    rows, counts, starts, num_decode = _order_batch(state, num_scheduled)
    # Under overlap the index may take only what earlier plans computed: this one may still fail.
    counters[RowCounter.NUM_COMPUTED_BEFORE] = counters[RowCounter.NUM_COMPUTED]
    counters[RowCounter.NUM_COMPUTED] += num_scheduled
    num_logits, samples, pooling = mark_logits(state, num_scheduled)
    num_drafts, drafts = _list_drafts(state, rows) if state.may_draft else (NONE, NONE)
    saves = save_states(state, rows, starts, starts + counts)
    counters[RowCounter.LAST_STEP][rows] = state.num_steps
    # A plan without rows is not carried out, so what it would write waits for the next one.
    groups, page_rows, page_columns, numbers = (
        _flatten_writes(state) if len(rows) else (NONE, NONE, NONE, NONE)
    )
    plan = Plan(
        number=state.num_steps,
        num_decode=num_decode,
        rows=rows.astype(np.int32),
        admission_ids=counters[RowCounter.ADMISSION_ID].take(rows),
        starts=starts,
        stops=starts + counts,
        num_logits=num_logits.take(rows),
        samples=samples.take(rows),
        num_drafts=num_drafts,
        drafts=drafts,
        pooling=pooling.take(rows) if len(pooling) else NONE,
        page_groups=groups,
        page_rows=page_rows,
        page_columns=page_columns,
        page_numbers=numbers,
        new_row_ids=np.array(state.new_row_ids, np.int32) if state.new_row_ids else NONE,
        copies=_flatten_copies(state) if state.copies and len(rows) else NONE,
        saves=saves,
    )
    if len(num_drafts):
        follow_drafts(state, plan)
    return plan


def _order_batch(state: State, num_scheduled: Ints) -> tuple[Ints, Ints, Ints, int]:
    """Return the rows that run, decode rows first; what they compute; how many of them decode.

    A decode row computes one token after earlier ones, and is scored there.
    num_scheduled: [rows]    returns: rows [n] int64, counts and starts [n] int32, their number
    """
    rows, counters = indices(num_scheduled), state.row_counters
    counts, starts = num_scheduled.take(rows), counters[RowCounter.NUM_COMPUTED].take(rows)
    decode = (counts == 1) & (starts > 0)
    # Replays and shared prefixes rely on one logit a decode row, and a row that pools has none.
    if state.num_special:
        decode &= counters[RowCounter.POOLING].take(rows) == 0
    num_decode = int(np.count_nonzero(decode))
    if num_decode not in (0, len(rows)) and not all_set(decode[:num_decode]):
        # Attention backends take decode rows as one slice from the front.
        order = np.concatenate((indices(decode), indices(~decode)))
        rows, counts, starts = rows[order], counts[order], starts[order]
    return rows, counts, starts, num_decode


def mark_logits(state: State, num_scheduled: Ints) -> tuple[Ints, Ints, Ints]:
    """Return how many positions of each row get logits, which sample a token, and which pool.

    A row whose drafts do not all fit into the step loses the rest of them.
    num_scheduled, returns: [rows] int32, the last as `Plan.pooling`, empty when no row pools
    writes: placeholders and tokens in the row counters
    """
    counters = state.row_counters
    tokens, stops = counters[RowCounter.NUM_TOKENS], counters[RowCounter.NUM_COMPUTED]
    # The last position of an inner chunk gets logits too, though no token is sampled there. Only
    # logits tell whether a row is sound, and unsound pages must not be indexed (decision 0011).
    running = np.minimum(num_scheduled, 1)
    reached = (stops == tokens) * running
    # The usual step: no drafts and no prompt_logprobs, so whole columns need no case analysis.
    if not (state.num_special or state.may_draft):
        counters[RowCounter.NUM_PLACEHOLDERS] += reached
        tokens += reached
        return running, reached, NONE
    num_known = counters[RowCounter.NUM_KNOWN]
    num_drafts = count_drafts(counters)
    cut = (num_scheduled > 0) & (num_drafts > 0) & (stops < tokens) & (stops >= num_known)
    tokens[cut] = stops[cut]
    num_drafts = count_drafts(counters)
    reached = (stops == tokens) * running
    pools = counters[RowCounter.POOLING] * running
    pooling = pools * (1 + reached) if any_set(pools) else NONE
    reached *= 1 - pools
    scored = (counters[RowCounter.PROMPT_LOGPROBS] > 0) & (
        stops - num_scheduled < counters[RowCounter.NUM_PROMPT]
    )
    num_logits = np.where(
        (num_scheduled > 0) & scored, num_scheduled, np.maximum(reached * (num_drafts + 1), running)
    )
    num_logits *= 1 - pools
    # Rows that verify drafts get no placeholder: they may accept any number of tokens.
    plain = reached * (num_drafts == 0)
    counters[RowCounter.NUM_PLACEHOLDERS] += plain
    tokens += plain
    return num_logits, reached, pooling


def _list_drafts(state: State, rows: Ints) -> tuple[Ints, Ints]:
    """Return how many drafts each of the rows verifies, and these drafts; nothing when none does.

    The rows' logits are marked.
    rows: [n]    returns: [n] int32, [sum of the counts] int32
    """
    counters = state.row_counters
    # A row that is not at its last token computes what comes before its drafts, if it has any.
    num_drafts = count_drafts(counters) * (
        counters[RowCounter.NUM_COMPUTED] == counters[RowCounter.NUM_TOKENS]
    )
    num_drafts = num_drafts.take(rows)
    if not any_set(num_drafts):
        return NONE, NONE
    tokens = expand_intervals(rows, counters[RowCounter.NUM_KNOWN].take(rows), num_drafts)
    return num_drafts, state.tokens[tokens]


def _flatten_writes(state: State) -> tuple[Ints, Ints, Ints, Ints]:
    """Return page-table entries to write: groups, rows, columns, pages, each [m] int32."""
    if not state.writes:
        return NONE, NONE, NONE, NONE
    writes, state.writes = state.writes, []
    if len(writes) == 1:
        ((group, rows, columns, pages),) = writes
        groups = np.empty(len(rows), np.int32)
        groups.fill(group)  # a third of what `np.full` takes
        return groups, rows.astype(np.int32), columns, pages
    numbers, *parts = zip(*writes, strict=True)
    groups = np.repeat(np.array(numbers, np.int32), [len(rows) for rows in parts[0]])
    rows, columns, pages = map(np.concatenate, parts)
    return groups, rows.astype(np.int32), columns, pages


def _flatten_copies(state: State) -> Ints:
    """Return pages to copy: groups, sources and destinations, [m, 3] int32."""
    copies, state.copies = state.copies, {}
    return np.array(
        [(group, source, target) for (group, target), source in copies.items()], np.int32
    )
