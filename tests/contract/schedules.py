"""What schedulers and cache policies say and are told: each field changes a decision or a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
from toy_workloads import FULL, SCHEDULERS, STATE, limits, request

from headstock.builtin import mixed
from headstock.spi import (
    Budget,
    CachePolicy,
    Inserted,
    KVGroup,
    Match,
    RequestColumns,
    ScheduleDecision,
    ScheduleFunction,
    View,
)
from headstock_conformance.scheduler.toy_schedule import Drive
from headstock_radix_cache.policy import RadixCache

from .vary import Case, outcome_of, vary


def ints(*numbers: int) -> np.ndarray:
    """An array of the contract."""
    return np.array(numbers, np.int32)


def columns(*waits: int) -> RequestColumns:
    """Columns of requests that differ in how long they have been here."""
    same = ints(*[1] * len(waits))
    names = [each.name for each in attrs.fields(RequestColumns)]
    return RequestColumns(**dict.fromkeys(names, same) | {"waits": ints(*waits)})


VIEW = View(
    rows_by_priority=ints(2, 0, 1),
    num_new_tokens=ints(1, 9, 6, 0),
    num_computed_tokens=ints(12, 0, 3, 0),
    num_prompt_tokens=ints(5, 9, 9, 0),
    last_step=ints(4, 7, 6, 0),
    num_drafts=ints(0, 0, 0, 0),
    waiting_lengths=ints(5),
    waiting_priorities=ints(0),
    list_running=lambda: columns(30, 10, 20, 0),
    list_waiting=lambda: columns(5, 4, 6),
    step=8,
)
BUDGET = Budget(tokens=9, free_rows=1, pages=(20,), page_size=4)


def decide(view: View, budget: Budget = BUDGET) -> object:
    """What each shipped scheduler decides."""
    return [schedule(view, budget) for schedule in SCHEDULERS.values()]


def watch(**limit_changes: Any) -> tuple[list[Any], list[Any]]:
    """What a scheduler is shown while a small workload runs.

    Requests of several priorities and lengths, more than there are rows and pages for.
    """
    views: list[Any] = []
    budgets: list[Any] = []

    def schedule(view: View, budget: Budget) -> ScheduleDecision:
        views.append(view)
        budgets.append(budget)
        return mixed.schedule(view, budget)

    drive = Drive(limits(schedule=schedule, **({"max_rows": 2} | limit_changes)))
    for number, length in enumerate((5, 9, 3, 6)):
        drive.submit(request(str(number), list(range(length)), priority=number))
    drive.drain()
    return views, budgets


def shown(name: str, of: int = 1, **changes: Any) -> Case:
    """The case of what a scheduler is shown: the values of `name` under other limits."""

    def values(**limit_changes: Any) -> object:
        return [np.asarray(getattr(each, name)).tolist() for each in watch(**limit_changes)[of]]

    return lambda: (values(), values(**changes))


def longest_of_priority(view: View, budget: Budget) -> ScheduleDecision:
    """Admit the waiting request of the lowest priority alone, once no row is taken."""
    decision = mixed.schedule(view, budget)
    last = np.argsort(view.waiting_priorities, kind="stable")[:1].astype(np.int32)
    return attrs.evolve(decision, admit=last if not len(view.rows_by_priority) else ints())


def greatest(name: str) -> ScheduleFunction:
    """A scheduler of one row: it admits the request that has most of `name`."""

    def schedule(view: View, budget: Budget) -> ScheduleDecision:
        decision = mixed.schedule(view, budget)
        if len(view.rows_by_priority):
            return attrs.evolve(decision, admit=ints())
        values = getattr(view.list_waiting(), name)
        return attrs.evolve(decision, admit=values.argsort(kind="stable")[-1:].astype(np.int32))

    return schedule


def ended_by(name: str, *requests: dict[str, Any]) -> list[str]:
    """The order in which requests end that came one after the other, the longest first."""
    drive = Drive(limits(schedule=greatest(name), max_rows=1), tick=10)
    for number, fields in enumerate((requests[0], *requests)):
        length = fields.get("length", 3)
        rest = {key: value for key, value in fields.items() if key != "length"}
        drive.submit(request(str(number), list(range(length)), **({"max_tokens": 4} | rest)))
        drive.step()
    drive.drain()
    return list(drive.reasons)


def column(name: str, field: str, *values: Any) -> Case:
    """The case of a column: whoever has most of it goes first, whatever the order of arrival."""
    asked = [{field: value} for value in values]
    return lambda: (ended_by(name, *asked), ended_by(name, *asked[::-1]))


def oldest_first(tick: int) -> list[float]:
    """What a scheduler is shown of the waits of its rows."""
    seen: list[float] = []

    def schedule(view: View, budget: Budget) -> ScheduleDecision:
        seen.extend(view.list_running().waits.tolist())
        return mixed.schedule(view, budget)

    drive = Drive(limits(schedule=schedule, max_rows=2), tick=tick)
    drive.submit(request("0", [1, 2, 3]))
    drive.drain()
    return seen


def order_of(priorities: tuple[int, ...]) -> list[str]:
    """The order in which requests end under a scheduler that goes by their priorities."""
    drive = Drive(limits(schedule=longest_of_priority, max_rows=4))
    for number, priority in enumerate(priorities):
        drive.submit(request(str(number), [1, 2], priority=priority))
    drive.drain()
    return list(drive.reasons)


def plans(change: Callable[[ScheduleDecision], ScheduleDecision]) -> object:
    """The plans under a scheduler whose every decision is changed.

    A decision that core refuses is an outcome too.
    """

    def schedule(view: View, budget: Budget) -> ScheduleDecision:
        decision = mixed.schedule(view, budget)
        return decision if view.step < 3 else change(decision)

    drive = Drive(limits(schedule=schedule, max_rows=3))
    for number in range(4):
        drive.submit(request(str(number), [number] * 6, 4))
    for _ in range(6):
        drive.step()
    return [plan.encode() for plan in drive.plans]


def decided(**changes: Callable[[ScheduleDecision], Any]) -> Case:
    """The case of a field of a decision."""

    def change(decision: ScheduleDecision) -> ScheduleDecision:
        return attrs.evolve(decision, **{name: make(decision) for name, make in changes.items()})

    return lambda: (outcome_of(plans, lambda decision: decision), outcome_of(plans, change))


class ChangedCache(RadixCache):
    """The prefix tree, whose every match and insertion is changed."""

    def __init__(self, change: Callable[[Any], Any], groups: tuple[KVGroup, ...] = (FULL,)) -> None:
        super().__init__(4, groups)
        self.inner, self.change = RadixCache(4, groups), change
        self.roots: list[bool] = []

    def match_prefix(self, index: Any, keys: np.ndarray, namespace: str) -> Match:
        """The match, changed."""
        return self.change(self.inner.match_prefix(index, keys, namespace))  # type: ignore[no-any-return]

    def insert(self, *arguments: Any) -> Inserted:
        """The insertion, changed."""
        self.roots.append(arguments[1] is None)
        return self.change(self.inner.insert(*arguments))  # type: ignore[no-any-return]

    def insert_each(self, *arguments: Any) -> Any:
        """As the contract has it: `insert` for each row."""
        return CachePolicy.insert_each(self, *arguments)


def cached_plans(change: Callable[[Any], Any]) -> object:
    """The plans over a policy whose answers are changed, and which insertions are at the root."""

    def drain(policy: Any) -> object:
        drive = Drive(limits(policy=policy, check=False))
        for number in range(3):
            drive.submit(request(str(number), [*range(8), *[number] * 8], 9))
            drive.step()
        drive.drain(200)
        return [[plan.encode() for plan in drive.plans], policy.roots]

    return outcome_of(drain, ChangedCache(change))


def answered(kind: type, name: str, make: Callable[[Any], Any]) -> Case:
    """The case of a field of a policy's answer."""

    def change(answer: Any) -> Any:
        if not isinstance(answer, kind):
            return answer
        return attrs.evolve(answer, **{name: make(getattr(answer, name))})

    return lambda: (cached_plans(lambda answer: answer), cached_plans(change))


def branched_plans(num_known: int | None) -> object:
    """The plans of two prompts that part, in a model with a state.

    num_known: what each match says; None for what it finds
    """

    def change(answer: Any) -> Any:
        known = isinstance(answer, Match) and num_known is not None
        return attrs.evolve(answer, num_known=num_known) if known else answer

    groups = (FULL, STATE)
    policy = ChangedCache(change, groups)
    drive = Drive(limits(policy=policy, groups=groups, num_pages=(90, 20), snapshot_tokens=64))
    for name in "ab":
        drive.submit(request(name, [*range(40), *[ord(name)] * 60], 2))
        drive.drain(200)
    return [plan.encode() for plan in drive.plans]


CASES: dict[str, Case] = {
    **vary(
        VIEW,
        decide,
        {
            "rows_by_priority": ints(1, 2, 0),
            "num_new_tokens": ints(1, 1, 1, 0),
            "num_computed_tokens": ints(0, 0, 0, 0),
            "num_prompt_tokens": ints(99, 99, 99, 0),
            "last_step": ints(0, 0, 0, 0),
            "num_drafts": ints(0, 8, 0, 0),
            "waiting_lengths": ints(),
            "step": 9,
        },
    ),
    **vary(
        VIEW,
        lambda view: [
            greatest("waits")(attrs.evolve(view, rows_by_priority=ints()), BUDGET).admit,
            int(view.list_running().waits.argmax()),
        ],
        {
            "list_running": lambda: columns(10, 30, 20, 0),
            "list_waiting": lambda: columns(5, 6, 4),
        },
    ),
    "RequestColumns.lengths": column("lengths", "length", 3, 5, 9),
    "RequestColumns.num_prompt_tokens": column("num_prompt_tokens", "length", 3, 5, 9),
    "RequestColumns.max_tokens": column("max_tokens", "max_tokens", 2, 5, 9),
    "RequestColumns.priorities": column("priorities", "priority", 0, 1, 2),
    "RequestColumns.users": column("users", "user", "", "", "ada"),
    "RequestColumns.adapters": column("adapters", "adapter", "", "", "lora"),
    "RequestColumns.waits": lambda: (oldest_first(10), oldest_first(20)),
    "View.waiting_priorities": lambda: (order_of((0, 1, 2)), order_of((2, 1, 0))),
    **vary(BUDGET, lambda budget: decide(VIEW, budget), {"tokens": 2, "is_bounded": True}),
    "Budget.free_rows": shown("free_rows", max_rows=3),
    "Budget.pages": shown("pages", num_pages=60),
    "Budget.page_size": shown("page_size", page_size=8),
    "ScheduleDecision.rows": decided(rows=lambda made: made.rows * 0),
    "ScheduleDecision.counts": decided(counts=lambda made: made.counts + 1),
    "ScheduleDecision.admit": decided(admit=lambda made: ints(0, 0)),
    "ScheduleDecision.ask_again_ms": decided(ask_again_ms=lambda made: -1),
    "ScheduleDecision.victims": decided(
        victims=lambda made: made.rows[-1:],
        rows=lambda made: made.rows[:-1],
        counts=lambda made: made.counts[:-1],
    ),
    "Match.pages": answered(Match, "pages", lambda pages: pages[:, :1]),
    "Match.num_known": lambda: (
        outcome_of(branched_plans, None),
        outcome_of(branched_plans, 0),
    ),
    "Match.handle": answered(Match, "handle", lambda handle: None),
    "Inserted.canonical": answered(Inserted, "canonical", lambda pages: pages[:, :0]),
    "Inserted.handle": answered(Inserted, "handle", lambda handle: None),
}
