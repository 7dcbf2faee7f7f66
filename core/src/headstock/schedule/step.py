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
from headstock.schedule.pages import available, drop_behind, grow, index_full
from headstock.schedule.plan import Plan
from headstock.schedule.request import Entry
from headstock.schedule.state import Column, Draft, State, draft_of, every, seal, some
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
    plan = commit(draft, choose(draft))
    rank(draft)
    state = seal(draft)
    if limits.check:
        check(state, limits)
    return state, plan


def choose(draft: Draft) -> Ints:
    """How many tokens each row computes, pages already in their tables; waiting requests are seated here.

    returns: [rows] int32
    """
    limits = draft.limits
    view = look(draft, draft.waiting[: limits.max_rows - len(draft.ranked)])
    budget = Budget(
        tokens=limits.max_batch_tokens,
        free_rows=limits.max_rows - len(draft.ranked),
        pages=available(draft, 0),
        page_size=limits.page_size,
    )
    choice = limits.choose(view, budget)
    chosen = judge(draft, view, budget, choice)
    preempted = draft.num_preempted
    for row in choice.victims.tolist():
        preempt(draft, row)
    chosen = provide(draft, chosen)
    # Rows preempted since the choice are in the queue now, so positions in it no longer stand.
    if not len(choice.admit) or draft.num_preempted != preempted:
        return chosen
    admit(draft, choice.admit, limits.max_batch_tokens - int(chosen.sum()), chosen)
    if some(chosen) or not some(view.want):
        return chosen
    # It waited for requests that found no room: ask again without them.
    choice = limits.choose(look(draft, ()), budget)
    return provide(draft, judge(draft, view, budget, choice))


def look(draft: Draft, waiting: Sequence[Entry]) -> View:
    """What a scheduler may see, `waiting` of the queue."""
    columns = draft.columns
    want = np.minimum(columns[Column.NUM_TOKENS], columns[Column.MAX_LEN] - 1) - columns[Column.NUM_COMPUTED]
    want *= columns[Column.ACTIVE]
    if special(columns):
        want[(columns[Column.FENCED] & columns[Column.PROMISED]) > 0] = 0
    return View(
        ranked=draft.ranked,
        want=want,
        computed=columns[Column.NUM_COMPUTED],
        prompt=columns[Column.NUM_PROMPT],
        last_run=columns[Column.LAST_RUN],
        waiting_lengths=np.array([len(entry.tokens) for entry in waiting], np.int32) if waiting else NONE,
        waiting_priorities=np.array([entry.request.priority for entry in waiting], np.int32) if waiting else NONE,
        number=draft.old.num_steps,
    )


def judge(draft: Draft, view: View, budget: Budget, choice: Choice) -> Ints:
    """What was chosen, by row.   returns: [rows] int32, 0 where a row does not run

    raises: PluginBroken, naming the scheduler and the rule, when the choice breaks one
    """
    chosen = np.zeros(draft.limits.max_rows, np.int32)
    fault = ""
    if len(choice.rows) != len(choice.counts):
        fault = f"{len(choice.rows)} rows but {len(choice.counts)} counts"
    elif len(choice.rows):
        try:
            chosen[choice.rows] = choice.counts
        except IndexError:
            fault = "a row that does not exist"
        if np.count_nonzero(chosen) != len(choice.rows):
            fault = fault or "a row twice, or for no tokens"
        elif some(chosen.view(np.uint32) > view.want.view(np.uint32)):  # a negative count is a huge one
            fault = "a row that is free or wants fewer tokens"
        elif int(chosen.sum()) > budget.tokens:
            fault = f"{chosen.sum()} tokens of {budget.tokens}"
    if len(choice.admit) and not legal_positions(choice.admit, len(view.waiting_lengths)):
        fault = "waiting positions that are not in ascending order or do not exist"
    if len(choice.victims) and not np.isin(choice.victims, np.setdiff1d(view.ranked, choice.rows)).all():
        fault = "a victim that is free or chosen to run"
    if fault:
        raise PluginBroken(
            f"the scheduler {draft.limits.scheduler!r} chose {fault}; report it to its author or pick another "
            "--scheduler"
        )
    return chosen


def legal_positions(positions: Ints, count: int) -> bool:
    """Whether the positions ascend within [0, count)."""
    return bool((np.diff(positions) > 0).all() and positions[0] >= 0 and positions[-1] < count)


def provide(draft: Draft, chosen: Ints) -> Ints:
    """Give the chosen rows the pages they need, preempting from the lowest rank up when the pool is full.

    chosen: [rows]    returns: [rows], what runs after all
    """
    stops = draft.columns[Column.NUM_COMPUTED] + chosen
    needs = -(-stops // draft.limits.page_size) - draft.spans
    short = needs > 0
    if not some(short):
        return chosen
    needs *= short
    if all(int(need.sum()) <= available(draft, group) for group, need in enumerate(needs)):
        for group, need in enumerate(needs):
            rows = np.flatnonzero(need)
            if len(rows):
                grow(draft, group, rows, need.take(rows))
        return chosen
    return squeeze(draft, chosen, needs)


def squeeze(draft: Draft, chosen: Ints, needs: Ints) -> Ints:
    """As `provide`, when pages are short: rows are served in rank order, and each may preempt rows of lower rank only.

    chosen: [rows]    needs: [groups, rows]
    The first in rank can take everyone's pages, and every request fits the pool alone, so some row always goes on. A
    scheduler may have chosen rows of low rank alone: the lowest is preempted then, for those that were not chosen.
    """
    running = draft.ranked.tolist()
    kept = np.zeros_like(chosen)
    while running:
        row = running.pop(0)
        if not chosen[row]:
            continue
        need = needs[:, row].tolist()
        while running and any(count > available(draft, group) for group, count in enumerate(need)):
            preempt(draft, running.pop())
        if any(count > available(draft, group) for group, count in enumerate(need)):
            if not some(kept):
                preempt(draft, row)
            break  # nobody of lower rank is left, so this was the last row
        for group, count in enumerate(need):
            if count:
                grow(draft, group, np.array([row]), np.array([count]))
        kept[row] = chosen[row]
    return kept


def commit(draft: Draft, chosen: Ints) -> Plan:
    """The plan for the chosen rows, with the counters moved on to what will be true once it has run.

    chosen: [rows]
    """
    columns = draft.columns
    rows = np.flatnonzero(chosen)
    counts, starts = chosen.take(rows), columns[Column.NUM_COMPUTED].take(rows)
    decode = (counts == 1) & (starts > 0)
    num_decode = int(np.count_nonzero(decode))
    if num_decode not in (0, len(rows)) and not every(decode[:num_decode]):
        order = np.concatenate([np.flatnonzero(decode), np.flatnonzero(~decode)])
        rows, counts, starts = rows[order], counts[order], starts[order]
    columns[Column.BEFORE] = columns[Column.NUM_COMPUTED]
    columns[Column.NUM_COMPUTED] += chosen
    num_logits, samples = score(columns, chosen)
    np.copyto(columns[Column.LAST_RUN], draft.old.num_steps, where=chosen > 0)
    # A plan without rows is not carried out, so what it would write waits for the next one.
    groups, page_rows, page_columns, numbers = flat_writes(draft) if len(rows) else (NONE, NONE, NONE, NONE)
    return Plan(
        number=draft.old.num_steps,
        num_decode=num_decode,
        rows=rows.astype(np.int32),
        orders=columns[Column.ORDER].take(rows),
        starts=starts,
        stops=starts + counts,
        num_logits=num_logits.take(rows),
        samples=samples.take(rows),
        page_groups=groups,
        page_rows=page_rows,
        page_columns=page_columns,
        page_numbers=numbers,
        joined=np.array(draft.joined, np.int32) if draft.joined else NONE,
    )


def special(columns: Ints) -> bool:
    """Whether any row is fenced (and so may have drafts) or has its prompt scored."""
    return some(columns[Column.FENCED : Column.SCORED + 1])


def score(columns: Ints, chosen: Ints) -> tuple[Ints, Ints]:
    """How many positions of each row are scored, and which rows get a token; promises are noted in the columns.

    The last position is scored even of an inner chunk, which gets no token: only logits tell that what was computed
    is sound, and the prefix index must not learn of pages that are not.
    A row whose drafts do not all fit into the step loses the rest of them.   chosen, returns: [rows] int32
    """
    tokens, stops = columns[Column.NUM_TOKENS], columns[Column.NUM_COMPUTED]
    running = (chosen > 0).astype(np.int32)
    reached = (stops == tokens) * running
    if not special(columns):
        columns[Column.PROMISED] += reached
        tokens += reached
        return running, reached
    known = columns[Column.NUM_KNOWN]
    drafted = tokens - known - columns[Column.PROMISED]
    cut = (chosen > 0) & (drafted > 0) & (stops < tokens) & (stops >= known)
    tokens[cut] = stops[cut]
    drafted = tokens - known - columns[Column.PROMISED]
    reached = (stops == tokens) * running
    scored = (columns[Column.SCORED] > 0) & (stops - chosen < columns[Column.NUM_PROMPT])
    num_logits = np.where((chosen > 0) & scored, chosen, np.maximum(reached * (drafted + 1), running))
    plain = reached * (drafted == 0)
    columns[Column.PROMISED] += plain
    tokens += plain
    return num_logits, reached


def flat_writes(draft: Draft) -> tuple[Ints, Ints, Ints, Ints]:
    """The page table entries to write: groups, rows, columns, pages, each [m] int32."""
    if not draft.writes:
        return NONE, NONE, NONE, NONE
    writes, draft.writes = draft.writes, []
    groups = [np.full(len(rows), group, np.int32) for group, rows, *_ in writes]
    if len(writes) == 1:
        _, rows, columns, pages = writes[0]
    else:
        rows, columns, pages = (np.concatenate(parts) for parts in list(zip(*writes, strict=True))[1:])
    return np.concatenate(groups), rows.astype(np.int32), columns.astype(np.int32), pages
