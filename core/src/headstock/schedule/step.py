"""One step of scheduling: a pure function over frozen records."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headstock.errors import PluginBroken
from headstock.schedule.absorb import absorb, preempt
from headstock.schedule.admit import admit, make_room, rank
from headstock.schedule.check import check
from headstock.schedule.events import NONE, Event
from headstock.schedule.limits import Limits
from headstock.schedule.pages import available, drop_behind, gather, grow, index_full
from headstock.schedule.plan import Plan
from headstock.schedule.request import Entry
from headstock.schedule.state import Column, Draft, State, draft_of, seal
from headstock.spi.scheduler import Budget, Choice, View

Ints = np.ndarray


def step(state: State, events: Sequence[Event], limits: Limits) -> tuple[State, Plan]:
    """The state after `events`, and the work to launch next.

    Of `state` only the two owned values are written; everything else of it stays as it was.
    """
    draft = draft_of(state, limits)
    for event in events:
        absorb(draft, event)
    index_full(draft)
    for group, kind in enumerate(limits.groups):
        if kind.kind == "window":
            drop_behind(draft, group, np.flatnonzero(draft.columns[Column.ACTIVE]))
    make_room(draft)
    rows, counts = choose(draft)
    plan = commit(draft, rows, counts)
    for group in range(len(draft.pages)):
        gather(draft, group)
    rank(draft)
    state = seal(draft)
    if limits.check:
        check(state, limits)
    return state, plan


def choose(draft: Draft) -> tuple[Ints, Ints]:
    """Rows to run and how many tokens each, pages already in their tables; waiting requests are seated here."""
    limits = draft.limits
    view = look(draft, draft.waiting[: limits.max_rows - len(draft.ranked)])
    budget = Budget(
        tokens=limits.max_batch_tokens,
        free_rows=limits.max_rows - len(draft.ranked),
        pages=available(draft, 0),
        page_size=limits.page_size,
    )
    choice = limits.choose(view, budget)
    judge(draft, view, budget, choice)
    for row in choice.victims.tolist():
        preempt(draft, row)
    rows, counts = provide(draft, choice.rows, choice.counts)
    if len(choice.admit) == 0 or len(choice.victims):
        return rows, counts
    # Rows preempted for want of pages change the queue, so what was chosen of it no longer stands.
    if draft.num_preempted != draft.old.num_preempted:
        return rows, counts
    more_rows, more_counts = admit(draft, choice.admit, limits.max_batch_tokens - int(counts.sum()))
    if not len(more_rows) and not len(rows) and view.want.any():
        # It waited for requests that found no room: ask again without them.
        choice = limits.choose(look(draft, ()), budget)
        judge(draft, view, budget, choice)
        return provide(draft, choice.rows, choice.counts)
    return np.concatenate([rows, more_rows]), np.concatenate([counts, more_counts])


def look(draft: Draft, waiting: Sequence[Entry]) -> View:
    """What a scheduler may see, `waiting` of the queue."""
    ranked = draft.ranked
    columns = draft.columns[:, ranked]
    computed = columns[Column.NUM_COMPUTED]
    want = np.minimum(columns[Column.NUM_TOKENS], columns[Column.MAX_LEN] - 1) - computed
    fenced = (columns[Column.FENCED] > 0) & (columns[Column.PROMISED] > 0)
    if fenced.any():
        want[fenced] = 0
    return View(
        rows=ranked,
        want=want,
        computed=computed,
        rank=np.arange(len(ranked), dtype=np.int32),
        idle=columns[Column.IDLE],
        decoding=computed >= columns[Column.NUM_PROMPT],
        waiting_lengths=np.array([len(entry.tokens) for entry in waiting], np.int32) if waiting else NONE,
        waiting_priorities=np.array([entry.request.priority for entry in waiting], np.int32) if waiting else NONE,
        number=draft.old.num_steps,
    )


def judge(draft: Draft, view: View, budget: Budget, choice: Choice) -> None:
    """Refuse a choice that breaks the rules.   raises: PluginBroken, naming the scheduler and the rule"""
    rows, counts = choice.rows, choice.counts
    if len(rows) != len(counts):
        fault = f"{len(rows)} rows but {len(counts)} counts"
    elif len(rows) and (rows.min() < 0 or rows.max() >= draft.limits.max_rows):
        fault = "a row that does not exist"
    else:
        want = np.zeros(draft.limits.max_rows, np.int32)
        want[view.rows] = view.want
        if (counts < 1).any() or (counts > want[rows]).any():
            fault = "a row that is free or wants fewer tokens"
        elif np.bincount(rows, minlength=1).max() > 1:
            fault = "a row twice"
        elif counts.sum() > budget.tokens:
            fault = f"{counts.sum()} tokens of {budget.tokens}"
        elif len(choice.admit) and not legal_positions(choice.admit, len(view.waiting_lengths)):
            fault = "waiting positions that are not in ascending order or do not exist"
        elif len(choice.victims) and not np.isin(choice.victims, np.setdiff1d(view.rows, rows)).all():
            fault = "a victim that is free or chosen to run"
        else:
            return
    raise PluginBroken(
        f"the scheduler {draft.limits.scheduler!r} chose {fault}; report it to its author or pick another --scheduler"
    )


def legal_positions(positions: Ints, count: int) -> bool:
    """Whether the positions ascend within [0, count)."""
    return bool((np.diff(positions) > 0).all() and positions[0] >= 0 and positions[-1] < count)


def provide(draft: Draft, rows: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """Give the chosen rows the pages they need, preempting from the lowest rank up when the pool is full; who runs."""
    stops = draft.columns[Column.NUM_COMPUTED, rows] + counts
    pages = -(-stops // draft.limits.page_size)
    needs = np.maximum(pages - draft.spans[:, rows], 0)
    if all(int(need.sum()) <= available(draft, group) for group, need in enumerate(needs)):
        for group, i in np.argwhere(needs).tolist():
            grow(draft, group, int(rows[i]), int(needs[group, i]))
        return rows, counts
    return squeeze(draft, rows, counts, needs)


def squeeze(draft: Draft, rows: Ints, counts: Ints, needs: Ints) -> tuple[Ints, Ints]:
    """As `provide`, when pages are short: rows are served in rank order, and each may preempt rows of lower rank only.

    needs: [groups, n]
    The first in rank can take everyone's pages, and every request fits the pool alone, so some row always goes on.
    """
    place = {row: i for i, row in enumerate(rows.tolist())}
    running = draft.ranked.tolist()
    kept: list[int] = []
    while running:
        row = running.pop(0)
        if row not in place:
            continue
        need = needs[:, place[row]].tolist()
        while running and any(count > available(draft, group) for group, count in enumerate(need)):
            preempt(draft, running.pop())
        if any(count > available(draft, group) for group, count in enumerate(need)):
            break  # nobody of lower rank is left, so this was the last row
        for group, count in enumerate(need):
            if count:
                grow(draft, group, row, count)
        kept.append(place[row])
    order = np.array(sorted(kept), np.int64)
    return rows[order], counts[order]


def commit(draft: Draft, rows: Ints, counts: Ints) -> Plan:
    """The plan for these rows, with the counters moved on to what will be true once it has run."""
    columns = draft.columns
    starts = columns[Column.NUM_COMPUTED, rows]
    decode = (counts == 1) & (starts > 0)
    num_decode = int(np.count_nonzero(decode))
    if num_decode not in (0, len(rows)) and not decode[:num_decode].all():
        order = np.concatenate([np.flatnonzero(decode), np.flatnonzero(~decode)])
        rows, counts, starts = rows[order], counts[order], starts[order]
    stops = starts + counts
    num_logits, samples = score(columns, rows, starts, stops)
    columns[Column.NUM_COMPUTED, rows] = stops
    columns[Column.IDLE] += columns[Column.ACTIVE]
    columns[Column.IDLE, rows] = 0
    orders = columns[Column.ORDER, rows]
    groups, page_rows, page_columns, numbers = flat_writes(draft)
    return Plan(
        number=draft.old.num_steps,
        num_decode=num_decode,
        rows=rows,
        orders=orders,
        starts=starts,
        stops=stops,
        num_logits=num_logits,
        samples=samples,
        page_groups=groups,
        page_rows=page_rows,
        page_columns=page_columns,
        page_numbers=numbers,
        joined=np.array(draft.joined, np.int32) if draft.joined else NONE,
    )


def score(columns: Ints, rows: Ints, starts: Ints, stops: Ints) -> tuple[Ints, Ints]:
    """How many positions of each row are scored, and which rows get a token; promises are noted in the columns.

    A row whose drafts do not all fit into the step loses the rest of them.
    """
    tokens, known = columns[Column.NUM_TOKENS, rows], columns[Column.NUM_KNOWN, rows]
    promised = columns[Column.PROMISED, rows]
    drafted = tokens - known - promised
    if drafted.any():
        cut = (drafted > 0) & (stops < tokens) & (stops >= known)
        tokens = np.where(cut, stops, tokens)
        columns[Column.NUM_TOKENS, rows] = tokens
        drafted = tokens - known - promised
    reached = stops == tokens
    num_logits = np.where(reached, drafted + 1, 0).astype(np.int32)
    scored = (columns[Column.SCORED, rows] > 0) & (starts < columns[Column.NUM_PROMPT, rows])
    if scored.any():
        num_logits = np.where(scored, stops - starts, num_logits)
    plain = (reached & (drafted == 0)).astype(np.int32)
    columns[Column.PROMISED, rows] = promised + plain
    columns[Column.NUM_TOKENS, rows] = tokens + plain
    return num_logits, reached.astype(np.int32)


def flat_writes(draft: Draft) -> tuple[Ints, Ints, Ints, Ints]:
    """The page table entries to write, as flat arrays."""
    writes = draft.writes
    if not writes:
        return NONE, NONE, NONE, NONE
    lengths = np.array([len(pages) for *_, pages in writes])
    groups, rows, firsts = (
        np.repeat(np.array(part, np.int32), lengths) for part in list(zip(*writes, strict=True))[:3]
    )
    within = np.arange(lengths.sum(), dtype=np.int32) - np.repeat(np.cumsum(lengths) - lengths, lengths).astype(
        np.int32
    )
    return groups, rows, firsts + within, np.concatenate([pages for *_, pages in writes])
