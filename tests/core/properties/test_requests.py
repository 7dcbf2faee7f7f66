"""Requests: ids do not mix, limits hold, order follows priority, and each ends exactly once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from attrs import evolve, frozen
from core.properties.drawn import EXAMPLES, engines, requests, run
from hypothesis import assume, given
from hypothesis import strategies as st
from toy_engine import EngineHarness, Toys, expected, request
from toy_workloads import limits
from toy_workloads import request as toy_request

from headstock import LLM, SamplingParams
from headstock.engine.engine import Engine
from headstock.errors import CapacityError, RequestError
from headstock.execution.abstract_executor import Executor, Pending
from headstock.scheduler import Arrived, Limits, Plan, Request, initial_state, step
from headstock.spi import Sample
from headstock_conformance.scheduler.toy_device import VOCAB, alone
from headstock_conformance.scheduler.toy_schedule import Drive

FIFO = st.sampled_from(["mixed", "prefill-first", "decode-first"])


@pytest.fixture(scope="module")
def engine(toys: Toys) -> Iterator[Engine]:
    """An engine that serves all examples of a property, one after the other."""
    made = toys.engine(num_pages=50, max_running_requests=4, max_batch_tokens=30)
    yield made
    made.close()


@pytest.mark.feature("I1")
@EXAMPLES
@given(names=st.lists(st.sampled_from("abcd"), min_size=1, max_size=12), steps=st.integers(0, 3))
def test_an_id_belongs_to_one_live_request(engine: Engine, names: list[str], steps: int) -> None:
    harness, live = EngineHarness(engine), set[str]()
    for count, name in enumerate(names):
        if name in live:
            with pytest.raises(RequestError, match=f"request id {name} is in use"):
                harness.engine.submit(request(name, [1], 3))
        else:
            harness.reasons.pop(name, None)
            harness.submit(request(name, [1, count], 3))
            live.add(name)
        for _ in range(steps):
            harness.step()
        live -= harness.reasons.keys()
    harness.drain()


@pytest.mark.feature("I1")
@EXAMPLES
@given(prompts=st.lists(st.integers(1, 3), min_size=1, max_size=4), n=st.integers(1, 3))
def test_all_that_is_asked_of_an_llm_has_ids_of_its_own(
    llm: LLM, prompts: list[int], n: int
) -> None:
    asked = [{"prompt_token_ids": [token]} for token in prompts]
    params = SamplingParams(n=n, max_tokens=1, seed=1)
    answers = [*llm.generate(asked, params), *llm.generate(asked, params)]

    assert len({answer.request_id for answer in answers}) == 2 * len(prompts)


def in_one_place(drive: Drive) -> None:
    """I6: a live request waits or sits, and is never in two places."""
    waiting = [entry.request.id for entry in drive.state.waiting]
    running = [entry.request.id for entry in drive.state.requests_by_row if entry is not None]
    assert sorted([*waiting, *running, *drive.reasons]) == sorted(drive.outputs)


def within_the_caps(drive: Drive) -> None:
    """I7: rows, tokens and pages of a step, and the length of a sequence."""
    bounds, plan = drive.limits, drive.plans[-1]
    assert drive.state.num_running <= bounds.max_rows and plan.num_tokens <= bounds.max_batch_tokens
    assert len(set(plan.rows.tolist())) == len(plan.rows) <= bounds.max_rows
    counts = [np.count_nonzero(refs) for refs in drive.state.refs]
    assert all(count <= most for count, most in zip(counts, bounds.num_pages, strict=True))
    assert (plan.stops <= bounds.max_len).all()


@pytest.mark.feature("I6", "I7", "I11", "I14")
@EXAMPLES
@given(bounds=engines(), asked=requests(), gap=st.integers(1, 4))
def test_requests_keep_place_and_caps_and_end_in_time_as_they_would_alone(
    bounds: Limits, asked: list[Request], gap: int
) -> None:
    preemptions: dict[str, int] = {}

    def see(drive: Drive) -> None:
        in_one_place(drive)
        within_the_caps(drive)
        preemptions.update(
            {
                entry.request.id: entry.preemptions
                for entry in drive.state.waiting
                if entry.preemptions
            }
        )

    drive = run(bounds, asked, see, gap)
    assert drive.outputs == {one.id: alone(one) for one in asked}
    assert set(drive.reasons.values()) <= {"stop", "length"}
    first = max(asked, key=lambda one: one.priority)
    assert first.id not in preemptions, "the first in priority order was preempted"
    # Every step computes a token, but for one that overlap wastes at the start and one at the end
    # of each admission.
    admissions = {one.id: 1 + preemptions.get(one.id, 0) for one in asked}
    work = sum((one.max_len + 2) * admissions[one.id] for one in asked)
    assert len(drive.plans) <= work + gap * len(asked) + 4


@frozen
class Sick(Executor):
    """An executor whose steps lose some rows to NaN: `rows` lists them by the number of the
    launch.
    """

    inner: Any
    rows: dict[int, int]
    launched: list[int]

    def execute(self, plan: Plan, new_rows: Any) -> Pending:
        """Carry the plan out."""
        self.launched.append(len(self.launched))
        return Ill(self.inner.execute(plan, new_rows), self.rows.get(self.launched[-1]))

    def close(self) -> None:
        """The engine's own executor is closed by whoever has it."""


@frozen(eq=False)
class Ill(Pending):
    """What such a step gives."""

    inner: Pending
    row: int | None

    @property
    def is_replayed(self) -> bool:  # type: ignore[override]
        """Whether the step replays a graph."""
        return self.inner.is_replayed

    def wait(self) -> Sample:
        """The sample, one row of which may be unhealthy."""
        sample = self.inner.wait()
        if self.row is None:
            return sample
        healthy = sample.healthy.clone()
        healthy[self.row % len(healthy)] = False
        return evolve(sample, healthy=healthy)


@pytest.mark.feature("I15")
@EXAMPLES
@given(
    prompts=st.lists(
        st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12), min_size=1, max_size=5
    ),
    rows=st.dictionaries(st.integers(0, 20), st.integers(0, 3), max_size=3),
)
def test_a_row_that_fails_fails_alone(
    engine: Engine, prompts: list[list[int]], rows: dict[int, int]
) -> None:
    failed = engine.stats().failed
    well, engine.executor = engine.executor, Sick(engine.executor, rows, [])
    try:
        harness = EngineHarness(engine).run(
            request(str(i), prompt, 6) for i, prompt in enumerate(prompts)
        )
    finally:
        sick, engine.executor = engine.executor, well
    reasons = list(harness.reasons.values())

    assert reasons.count("error") == engine.stats().failed - failed <= len(rows), (
        "a row did not fail alone"
    )
    assert set(reasons) <= {"length", "error"}
    assert "error" in reasons or not rows or min(rows) >= len(sick.launched)
    for name, reason in harness.reasons.items():  # EngineHarness has checked them
        assert reason == "error" or harness.outputs[name] == expected(harness.requests[name])


@pytest.mark.feature("I16")
@EXAMPLES
@given(
    length=st.integers(1, 400),
    most=st.integers(1, 400),
    page_size=st.sampled_from([1, 4, 16]),
    data=st.data(),
)
def test_what_can_never_fit_fails_at_once_and_disturbs_nobody(
    length: int, most: int, page_size: int, data: st.DataObject
) -> None:
    pages = data.draw(st.integers(10, 200))
    bounds = limits(max_len=160, page_size=page_size, num_pages=pages)
    assume(length + most > 160 or -(-(length + most - 1) // page_size) > pages)
    state = initial_state(bounds)
    step(state, (Arrived(toy_request("big", np.zeros(length), most)),))
    assert [(ended.id, ended.reason) for ended in state.ended] == [("big", "error")], (
        "it was not refused"
    )
    assert not state.num_running and not state.waiting and tuple(state.num_free) == bounds.num_pages

    small = toy_request("small", [1, 2, 3], 3)
    drive = Drive(bounds)
    drive.submit(toy_request("big", np.zeros(length), most))
    drive.submit(small)
    drive.drain(20)
    assert (
        drive.outputs == {"big": [], "small": alone(small)} and drive.reasons["small"] == "length"
    )


@pytest.mark.feature("I16")
@EXAMPLES
@given(length=st.integers(0, 400), most=st.integers(1, 400))
def test_the_engine_refuses_at_its_door_naming_both_numbers(
    engine: Engine, length: int, most: int
) -> None:
    assume(not length or length + most > 160)
    wanted = rf"{length} .*160|{length + most}.*160" if length else "the prompt is empty"
    with pytest.raises(CapacityError, match=wanted):
        engine.submit(request("big", np.zeros(length), most))
    assert not engine.has_work


def seated_in(drive: Drive) -> list[str]:
    """Return the ids of requests in the order in which they were first admitted."""
    return [drive.names[order] for order in sorted(drive.names)]


@pytest.mark.feature("I17")
@EXAMPLES
@given(bounds=engines(max_rows=1, overlap=False, num_pages=200), asked=requests(most=4))
def test_higher_priority_goes_first(bounds: Limits, asked: list[Request]) -> None:
    drive = Drive(bounds)
    for one in asked:
        drive.submit(one)
    drive.drain()

    assert list(drive.reasons) == [one.id for one in sorted(asked, key=lambda one: -one.priority)]


@pytest.mark.feature("I18")
@EXAMPLES
@given(
    scheduler=FIFO,
    rows=st.integers(1, 5),
    overlap=st.booleans(),
    asked=requests(priority=1),
    gap=st.integers(1, 3),
)
def test_equals_are_served_in_the_order_they_came(
    scheduler: str, rows: int, overlap: bool, asked: list[Request], gap: int
) -> None:
    bounds = limits(
        scheduler=scheduler, max_rows=rows, overlap=overlap, policy=None, num_pages=100, check=False
    )

    assert seated_in(run(bounds, asked, gap=gap)) == [one.id for one in asked]
