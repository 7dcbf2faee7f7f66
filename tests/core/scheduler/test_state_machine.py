"""Arrivals, steps, aborts and failures in any order.

The invariants hold after every step, and every request ends once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attrs import evolve
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from toy_workloads import (
    FULL,
    SCHEDULERS,
    STATE,
    fewest_pages,
    limits,
    request,
    to_pooling,
    window,
)

from headstock.scheduler import Aborted, Failed, PoolingKind, find_refusal
from headstock.spi import Budget, KVGroup, ScheduleDecision, View
from headstock_conformance.scheduler.toy_device import VOCAB, alone
from headstock_conformance.scheduler.toy_schedule import Drive

TOKENS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=50)


class Scheduling(RuleBasedStateMachine):
    """An engine of the toy model under any treatment. `limits.check` looks at every state."""

    @initialize(
        size=st.sampled_from([1, 4, 16]),
        pages=st.integers(5, 40),
        rows=st.integers(1, 5),
        tokens=st.sampled_from([1, 5, 30]),
        reuse=st.sampled_from(["index", "regions", "nothing"]),
        beside=st.sampled_from([(), (), (window(7),), (STATE,), (window(20), STATE)]),
        share=st.floats(0, 1),
        scheduler=st.sampled_from(sorted(SCHEDULERS)),
        drafts=st.booleans(),
        overlap=st.booleans(),
    )
    def start(
        self,
        size: int,
        pages: int,
        rows: int,
        tokens: int,
        reuse: str,
        beside: tuple[KVGroup, ...],
        share: float,
        scheduler: str,
        drafts: bool,
        overlap: bool,
    ) -> None:
        changes = {"overlap": overlap} if reuse == "index" else {"overlap": overlap, "policy": None}
        if reuse == "regions":
            size, pages, beside, changes["max_regions"] = 160, rows, (), rows
        sizes = {"page_size": size, "max_rows": rows, "max_batch_tokens": tokens}
        # Each group has a count of its own, from what the longest request needs to room for all.
        counts = [pages]
        for group in beside:
            few = fewest_pages(group, **sizes)
            most = rows if group is STATE else max(pages, few)
            counts.append(few + round(share * (most - few)))
        bounds = limits(
            **sizes,
            num_pages=tuple(counts),
            groups=(FULL, *beside),
            scheduler=scheduler,
            **changes,
        )
        self.victims = 0
        self.drive = Drive(
            evolve(bounds, schedule=self.schedule), np.random.default_rng(0) if drafts else None
        )
        self.inner = bounds.schedule
        self.requests = {}
        self.aborted: set[str] = set()

    def schedule(self, view: View, budget: Budget) -> ScheduleDecision:
        """What the scheduler chooses, but for victims: the rows of lowest priority."""
        choice = self.inner(view, budget)
        count, self.victims = min(self.victims, len(view.rows_by_priority)), 0
        if not count:
            return choice
        victims = view.rows_by_priority[-count:]
        for row in victims.tolist():
            self.drive.transitions.allow_preemption(self.drive.state.requests_by_row[row])
        stay = ~np.isin(choice.rows, victims)
        return ScheduleDecision(rows=choice.rows[stay], counts=choice.counts[stay], victims=victims)

    @rule(
        tokens=TOKENS,
        most=st.integers(1, 20),
        shared=st.booleans(),
        stop=st.integers(0, 9),
        n=st.sampled_from([1, 1, 3]),
        priority=st.integers(0, 2),
        namespace=st.sampled_from(["", "other"]),
        pooling=st.sampled_from(["", "", "", "last", "mean"]),
    )
    def arrive(
        self,
        tokens: list[int],
        most: int,
        shared: bool,
        stop: int,
        n: int,
        pooling: PoolingKind,
        **more: Any,
    ) -> None:
        """A request, or several that ask for the same."""
        head = list(range(20)) if shared else []
        for _ in range(n):
            name = str(len(self.requests))
            one = request(
                name,
                head + tokens,
                most,
                stop_ids=(stop,),
                **more,
            )
            one = to_pooling(one, pooling) if pooling else one
            self.requests[name] = one
            self.drive.submit(one)

    @rule(count=st.integers(1, 3))
    def preempt(self, count: int) -> None:
        """The next step preempts so many rows."""
        self.victims = count

    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.drive.step()

    @rule(which=st.integers(0, 30))
    def abort(self, which: int) -> None:
        name = str(which % (len(self.requests) + 1))  # the last id is unknown
        self.drive.events.append(Aborted(name))
        self.aborted |= {name} & self.requests.keys()

    @rule(which=st.integers(0, 4))
    def fail(self, which: int) -> None:
        plan = self.drive.plans[-1] if self.drive.plans else None
        if plan is not None and which < len(plan.rows):
            self.drive.events.insert(
                0, Failed(plan.rows[which : which + 1], plan.admission_ids[which : which + 1])
            )

    @invariant()
    def caps_hold(self) -> None:
        if hasattr(self, "drive"):
            bounds, state = self.drive.limits, self.drive.state
            assert state.num_running <= bounds.max_rows
            assert all(plan.num_tokens <= bounds.max_batch_tokens for plan in self.drive.plans[-4:])
            ids = [
                entry.request.id
                for entry in (*state.requests_by_row, *state.waiting)
                if entry is not None
            ]
            assert len(ids) == len(set(ids)) and not set(ids) & set(self.drive.reasons)
            waiting = {event.id for event in self.drive.events if isinstance(event, Aborted)}
            assert not self.aborted & set(ids) - waiting, "it runs on though aborted"

    def teardown(self) -> None:
        if not hasattr(self, "drive"):
            return
        self.drive.drain()
        assert set(self.drive.reasons) == set(self.requests)
        for name, reason in self.drive.reasons.items():
            one = self.requests[name]
            if reason in ("stop", "length"):
                assert self.drive.outputs[name] == alone(one)
            else:
                assert alone(one)[: len(self.drive.outputs[name])] == self.drive.outputs[name]
                assert reason == "abort" or reason == "error"
            if find_refusal(one, self.drive.limits):
                assert reason == "error" and not self.drive.outputs[name]
        assert not any(map(np.count_nonzero, self.drive.state.refs))


@pytest.mark.feature("I6", "I7", "I12", "I13")
def test_any_treatment_ends_every_request_once_and_brings_its_pages_back() -> None:
    run_state_machine_as_test(Scheduling, settings=settings(stateful_step_count=25))
