"""The requests in the rows of a table, and the plans of steps over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from attrs import define, frozen

from headstock.scheduler import Plan, Request
from headstock.spi.arrays import Ints

_NONE = np.zeros(0, np.int32)


@frozen(kw_only=True)
class Work:
    """What a row computes in a step.

    count: of its tokens; None for all that are known
    drafts: tokens behind those
    """

    row: int
    count: int | None = None
    drafts: tuple[int, ...] = ()


@define(eq=False)
class SeatedRow:
    """A request in a row.

    pages: by group
    tokens: known so far; what was sampled is as the reference has it
    computed: how many of them are in the pages
    is_new: no plan has admitted it yet
    """

    request: Request
    pages: tuple[Ints, ...]
    tokens: list[int]
    computed: int = 0
    is_new: bool = True

    def plan(self, work: Work) -> tuple[bool, list[int]]:
        """Whether it decodes, and its entries in a plan, from `Plan.rows` to `Plan.pooling`."""
        request, known, start = self.request, len(self.tokens), self.computed
        count = known - start if work.count is None else work.count
        stop, num_drafts = start + count + len(work.drafts), len(work.drafts)
        pools, is_last = bool(request.pooling), start + count == known
        is_scored = request.prompt_logprobs and start < len(request.prompt)
        num_logits = 0 if pools else stop - start if is_scored else num_drafts + 1
        samples, pooling = is_last and not pools, (1 + is_last) * pools
        is_decode = stop - start == 1 and start > 0 and not pools
        return is_decode, [work.row, start, stop, num_logits, samples, num_drafts, pooling]


def make_plan(rows: Mapping[int, SeatedRow], works: Sequence[Work], number: int) -> Plan:
    """The plan of a step, its decode rows first, otherwise in the order of the works."""
    planned = [(*rows[work.row].plan(work), work.drafts) for work in works]
    planned.sort(key=lambda each: not each[0])
    columns = np.array([entries for _, entries, _ in planned], np.int32).T.copy()
    row_ids, starts, stops, num_logits, samples, num_drafts, pooling = columns
    new_row_ids = np.array([row for row in row_ids.tolist() if rows[row].is_new], np.int32)
    entries = [
        (group, row, column, page)
        for row in new_row_ids.tolist()
        for group, pages in enumerate(rows[row].pages)
        for column, page in enumerate(pages)
    ]
    groups, page_rows, page_columns, numbers = np.array(entries, np.int32).reshape(-1, 4).T.copy()
    return Plan(
        number=number,
        num_decode=sum(is_decode for is_decode, *_ in planned),
        rows=row_ids,
        admission_ids=row_ids.copy(),
        starts=starts,
        stops=stops,
        num_logits=num_logits,
        samples=samples,
        num_drafts=num_drafts if num_drafts.any() else _NONE,
        drafts=np.array([token for *_, drafts in planned for token in drafts], np.int32),
        pooling=pooling if pooling.any() else _NONE,
        page_groups=groups,
        page_rows=page_rows,
        page_columns=page_columns,
        page_numbers=numbers,
        new_row_ids=new_row_ids,
    )


def count_drafts(plan: Plan) -> Ints:
    """How many drafts each row of a plan has, [n] int32."""
    return plan.num_drafts if len(plan.num_drafts) else np.zeros_like(plan.rows)


def find_sampled(plan: Plan) -> Ints:
    """Which of a plan's logits sample a token of a row, [m] int64."""
    return join_runs(plan.num_logits.cumsum(), (count_drafts(plan) + 1) * plan.samples)


def join_runs(ends: Ints, counts: Ints) -> Ints:
    """`counts` numbers before each end.   ends, counts: [n]    returns: [sum of counts] int64"""
    runs = [np.arange(end - count, end) for end, count in zip(ends, counts, strict=True)]
    return np.concatenate(runs, dtype=np.int64)
