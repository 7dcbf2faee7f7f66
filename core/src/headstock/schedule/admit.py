"""Seating waiting requests."""

from __future__ import annotations

import numpy as np

from headstock.schedule.absorb import preempt
from headstock.schedule.pages import available, grow, share
from headstock.schedule.request import Entry
from headstock.schedule.state import Column, Draft, writeable
from headstock.spi.cache import Match

Ints = np.ndarray


def rank(draft: Draft) -> None:
    """Bring `ranked` up to date after rows joined or left."""
    if not draft.reseated:
        return
    columns = draft.columns
    rows = np.flatnonzero(columns[Column.ACTIVE]).astype(np.int32)
    draft.ranked = rows[np.lexsort((columns[Column.ARRIVAL, rows], -columns[Column.PRIORITY, rows]))]
    draft.reseated = False


def make_room(draft: Draft) -> None:
    """Preempt rows of lower priority than what waits, while every seat is taken."""
    rank(draft)
    while draft.waiting and len(draft.ranked) == draft.limits.max_rows:
        lowest = int(draft.ranked[-1])
        if draft.columns[Column.PRIORITY, lowest] >= draft.waiting[0].request.priority:
            return
        preempt(draft, lowest)
        rank(draft)


def admit(draft: Draft, positions: Ints, budget: int, chosen: Ints) -> None:
    """Seat the waiting requests at `positions`, in that order, while tokens and pages last.

    writes: chosen [rows], the tokens that each seated row computes in this step
    """
    entries = [draft.waiting[i] for i in positions.tolist()]
    seated: set[int] = set()
    free_rows = np.flatnonzero(draft.columns[Column.ACTIVE] == 0).tolist()
    for entry, row in zip(entries, free_rows, strict=False):
        if budget <= 0:
            break
        count = seat(draft, entry, row, budget)
        if count == 0:
            break
        chosen[row] = count
        draft.joined.append(row)
        seated.add(id(entry))
        budget -= count
    if seated:
        draft.waiting = tuple(entry for entry in draft.waiting if id(entry) not in seated)
        draft.reseated = True


def seat(draft: Draft, entry: Entry, row: int, budget: int) -> int:
    """Give the entry the row and pages for its first tokens; how many those are, 0 when there is no room yet."""
    length = len(entry.tokens)
    match = find(draft, entry)
    cached = len(match.pages) * draft.limits.page_size if match else 0
    count = min(length - cached, budget)
    if not has_room(draft, match, length):
        return 0
    fill(draft, entry, row, cached)
    if match:
        share(draft, row, match)
    for group in range(len(draft.pages)):
        need = draft.limits.pages_for(cached + count) - len(draft.pages[group][row])
        if need > 0:
            grow(draft, group, np.array([row]), np.array([need]))
    return count


def find(draft: Draft, entry: Entry) -> Match | None:
    """The longest cached prefix; never the last token, which must be computed to be scored."""
    policy = draft.limits.policy
    if policy is None:
        return None
    searched = entry.tokens[:0] if entry.request.prompt_logprobs else entry.tokens[:-1]
    return policy.match(draft.index, searched, entry.request.namespace)


def has_room(draft: Draft, match: Match | None, length: int) -> bool:
    """Whether pages are left for all known tokens, with one spare for each running row so that it can grow.

    Without the spare pages a request seated in the last gap would be preempted again at once.
    """
    spare = int(np.count_nonzero(draft.columns[Column.ACTIVE]))
    for group in range(len(draft.pages)):
        need = draft.limits.most_pages(group, length)
        if match and group == 0:
            # Matched pages that someone holds cost nothing; the others stop being evictable.
            need -= int(np.count_nonzero(draft.refs[0][match.pages]))
        if need + spare > available(draft, group) and not (spare == 0 and need <= available(draft, group)):
            return False
    return True


def fill(draft: Draft, entry: Entry, row: int, cached: int) -> None:
    """Write the entry's counters and tokens to the row."""
    request, length = entry.request, len(entry.tokens)
    prompt = len(request.prompt)
    draft.num_admitted += 1
    draft.columns[:, row] = 0
    for column, value in (
        (Column.ACTIVE, 1),
        (Column.ORDER, draft.num_admitted),
        (Column.NUM_TOKENS, length),
        (Column.NUM_KNOWN, length),
        (Column.NUM_COMPUTED, cached),
        (Column.NUM_PROMPT, prompt),
        (Column.MAX_LEN, request.max_len),
        (Column.MIN_LEN, prompt + request.min_tokens),
        (Column.FENCED, request.fenced),
        (Column.SCORED, request.prompt_logprobs),
        (Column.CACHED, min(cached, prompt)),
        (Column.PRIORITY, request.priority),
        (Column.LAST_RUN, draft.old.num_steps),
        (Column.ARRIVAL, entry.arrival),
    ):
        draft.columns[column, row] = value
    draft.tokens[row, :length] = entry.tokens
    draft.seats[row] = entry
    set_stop_ids(draft, row, request.stop_ids)


def set_stop_ids(draft: Draft, row: int, ids: tuple[int, ...]) -> None:
    """Write the row's stop ids, widening the table when they do not fit."""
    width = len(draft.stop_ids)
    if len(ids) > width:
        draft.stop_ids = np.pad(draft.stop_ids, ((0, len(ids) - width), (0, 0)), constant_values=-1)
    draft.stop_ids = writeable(draft.stop_ids)
    draft.stop_ids[:, row] = -1
    draft.stop_ids[: len(ids), row] = ids
