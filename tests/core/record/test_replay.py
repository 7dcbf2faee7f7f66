"""A recording replays to the same plans, and a replay that differs says where."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from attrs import define, evolve, field
from core.record.runs import (
    make_recorder,
    make_requests,
    make_run_header,
    make_run_limits,
    record_run,
    run_steps,
)
from often import often
from toy_workloads import random_limits, random_requests
from toy_workloads import request as toy_request

from headstock.cli.main import main
from headstock.record.block import BlockReader, BlockWriter
from headstock.record.file import read_recording
from headstock.record.header import restore_limits
from headstock.record.recorded_step import PendingRecord, RecordedStep
from headstock.record.recorder import Recorder
from headstock.record.replay import replay_steps
from headstock.record.step_codec import EVENT_TYPES, list_fields, read_step, write_step
from headstock.scheduler import (
    Aborted,
    Arrived,
    Cleared,
    Clock,
    Event,
    Failed,
    Limits,
    Paced,
    Plan,
    Pooled,
    Request,
    Sampled,
    step,
)
from headstock_conformance.scheduler.toy_device import alone
from headstock_conformance.scheduler.toy_schedule import Drive

RNG = np.random.default_rng(11)


@define
class Recorded(Drive):
    """A drive that records."""

    recorder: Recorder = field(kw_only=True)

    def step(self) -> Plan:
        """One step: launch what was planned last, tell what has landed, plan, and record that."""
        landed = self.launch()
        events = [*([landed] if landed else []), *self.events]
        self.events = []
        plan = step(self.state, tuple(events))
        self.recorder.record_step(events, self.state, plan)
        self.plans.append(plan)
        self.collect_results()
        admitted = {row: self.state.requests_by_row[row] for row in plan.new_row_ids.tolist()}
        self.planned = plan, {row: entry for row, entry in admitted.items() if entry is not None}
        return plan


def drive_engine(
    path: Path, limits: Limits, arrivals: list[Request], rng: np.random.Generator | None = None
) -> Drive:
    """The requests run with the toy model to their end, recorded."""
    driven = Recorded(limits, rng, recorder=make_recorder(limits, path))
    for each in arrivals:
        driven.submit(each)
    driven.drain()
    driven.recorder.close()
    return driven


def replay_file(path: Path) -> tuple[list[Plan | None], str | None]:
    """The recorded plans, and what is said of the first that differs."""
    recording = read_recording(path)
    steps = list(replay_steps(recording.read_steps(), restore_limits(recording.header, check=True)))
    return [each.recorded.plan for each in steps], str(steps[-1].divergence) if steps[
        -1
    ].divergence else None


@pytest.mark.full
@pytest.mark.parametrize("overlap", often(1, [True, False]))
def test_a_run_of_256_requests_with_preemption_replays_to_the_same_plans(
    overlap: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = RNG.integers(0, 50, 24)
    arrivals = [
        toy_request(
            f"r{number}",
            np.concatenate(
                [shared[: int(RNG.integers(0, 24))], RNG.integers(0, 50, int(RNG.integers(1, 60)))]
            ),
            int(RNG.integers(1, 40)),
            stop_ids=tuple(RNG.integers(0, 50, number % 3).tolist()),
            min_tokens=0,
            priority=int(RNG.integers(0, 2)),
            namespace=("", "tenant")[number % 5 == 0],
        )
        for number in range(256)
    ]
    path = tmp_path / "run.recording"
    driven = drive_engine(
        path, make_run_limits(max_rows=32, num_pages=90, page_size=4, overlap=overlap), arrivals
    )

    assert driven.state.num_preempted > 0
    assert all(driven.outputs[each.id] == alone(each) for each in arrivals)
    plans, said = replay_file(path)
    assert said is None
    assert [plan.encode() for plan in plans if plan is not None] == [
        evolve(plan, drafts=np.zeros_like(plan.drafts)).encode() for plan in driven.plans
    ]
    assert main(["replay", str(path), "--check"]) == 0
    assert capsys.readouterr().out == f"{len(driven.plans)} steps, identical\n"


@pytest.mark.parametrize("seed", often(1, range(12)))
@pytest.mark.parametrize(
    "scheduler", often(2, ["mixed", "equal-length", "prefill-first", "decode-first"])
)
def test_any_engine_and_workload_replays(seed: int, scheduler: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    drafting = seed % 3 == 0
    limits = evolve(random_limits(rng, scheduler), max_drafts=3 if drafting else 0)
    path = tmp_path / "run.recording"
    driven = drive_engine(path, limits, random_requests(rng), rng if drafting else None)

    plans, said = replay_file(path)
    assert said is None
    assert [plan.encode() for plan in plans if plan is not None] == [
        evolve(plan, drafts=np.zeros_like(plan.drafts)).encode() for plan in driven.plans
    ]


@pytest.mark.parametrize("overlap", [False, True])
def test_regions_that_are_taken_over_replay(overlap: bool, tmp_path: Path) -> None:
    path, rng = tmp_path / "run.recording", np.random.default_rng(3)
    sizes = {"page_size": 400, "num_pages": 6, "max_rows": 6, "max_regions": 6, "policy": None}
    driven = Recorded(
        make_run_limits(overlap=overlap, **sizes),
        recorder=make_recorder(make_run_limits(overlap=overlap, **sizes), path),
    )
    talks = [rng.integers(0, 50, 20).astype(np.int32) for _ in range(4)]
    for turn in range(4):
        for number, talk in enumerate(talks):
            driven.submit(toy_request(f"{turn}.{number}", talk, 9, namespace="t" * (number % 2)))
        driven.drain()
        answers = [driven.outputs[f"{turn}.{number}"] for number in range(4)]
        talks = [
            np.concatenate([talk, said, [turn]]) for talk, said in zip(talks, answers, strict=True)
        ]
    driven.recorder.close()
    taken = sum(
        int((plan.starts[np.isin(plan.rows, plan.new_row_ids)] > 0).sum()) for plan in driven.plans
    )

    assert taken == 12 and replay_file(path)[1] is None


def change_plan(recorded: list[RecordedStep], at: int, **changes: np.ndarray) -> list[RecordedStep]:
    """The steps, the plan of one of them changed."""
    plan = recorded[at].plan
    assert plan is not None
    return [*recorded[:at], evolve(recorded[at], plan=evolve(plan, **changes)), *recorded[at + 1 :]]


def test_the_first_step_that_differs_is_named_with_its_field(tmp_path: Path) -> None:
    path = tmp_path / "run.recording"
    record_run(path, make_run_limits(), make_requests(20), 60)
    recording = read_recording(path)
    recorded = list(recording.read_steps())
    plan = recorded[30].plan
    assert plan is not None
    other = change_plan(
        recorded, 30, stops=plan.stops + np.eye(1, len(plan.stops), 2, dtype=np.int32)[0]
    )
    steps = list(replay_steps(iter(other), restore_limits(recording.header)))

    assert len(steps) == 31
    divergence = steps[-1].divergence
    assert divergence is not None and (divergence.step, divergence.field) == (30, "stops")
    assert f"from entry 2 of {len(plan.stops)}" in divergence.recorded
    assert (
        f"[{plan.stops[2] + 1} " in divergence.recorded
        and f"[{plan.stops[2]} " in divergence.replayed
    )


def test_another_scheduler_than_recorded_is_found_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = make_run_limits()
    path = tmp_path / "run.recording"
    recorder = make_recorder(limits, path)
    recorder.close()
    lying = make_recorder(
        evolve(make_run_limits(scheduler="prefill-first"), scheduler="mixed"), path
    )
    for events, state, plan in run_steps(
        make_run_limits(scheduler="prefill-first"), make_requests(200), 300
    ):
        lying.record_step(events, state, plan)
    lying.close()

    assert main(["replay", str(path)]) == 1
    assert capsys.readouterr().out.startswith("step ")


def test_a_scheduler_that_failed_fails_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.recording"
    recorder = make_recorder(make_run_limits(), path)
    for events, state, plan in run_steps(make_run_limits(), make_requests(5), 20):
        recorder.record_step(events, state, plan)
    bad: list[Event] = [Sampled(np.array([9999]), np.array([1]), None, np.array([1]))]
    recorder.record_failure(bad, IndexError("index 9999 is out of bounds"))
    recorder.close()

    assert main(["replay", str(path)]) == 0
    out = capsys.readouterr().out
    assert "identical; the last one fails as recorded: IndexError" in out


def test_a_recorded_failure_that_does_not_come_back_is_a_difference(tmp_path: Path) -> None:
    path = tmp_path / "run.recording"
    recorder = make_recorder(make_run_limits(), path)
    recorder.record_failure([], MemoryError("no memory"))
    recorder.close()

    _, said = replay_file(path)
    assert said == "step 0 differs in outcome: recorded MemoryError: no memory, replayed a plan"


@pytest.mark.feature("R1")
def test_every_event_keeps_its_fields() -> None:
    one = toy_request(
        "a",
        [1, 2, 3],
        4,
        stop_ids=(2, 3),
        priority=5,
        user="someone",
        adapter="lora",
        extra_args={"a": [1, {"b": None}]},
        namespace="x",
        wait_for_sample=True,
        prompt_logprobs=True,
        pooling="mean",
    )
    ints = np.arange(3, dtype=np.int32)
    events: list[Event] = [
        Clock(12),
        Arrived(one),
        Sampled(ints, ints, None, ints),
        Sampled(ints, ints, ints, ints, ints, ints, ints),
        Aborted("b", "stop"),
        Failed(ints, ints),
        Cleared(),
        Paced(64),
        Pooled(ints, ints),
    ]
    assert {type(event) for event in events} == set(EVENT_TYPES)
    plan = Plan(
        number=3,
        num_decode=1,
        rows=ints,
        admission_ids=ints,
        starts=ints,
        stops=ints,
        num_logits=ints,
        samples=ints,
        num_drafts=ints,
        drafts=ints,
        pooling=ints,
    )
    block = BlockWriter()
    write_step(block, PendingRecord(17, events, plan), None)
    write_step(block, PendingRecord(18, [], plan), None)
    reader = BlockReader(block.to_bytes())
    first, second = (read_step(reader, number, list_fields()) for number in (3, 4))

    assert reader.is_at_end and (first.at, second.at) == (17, 18)
    assert first.plan is not None and second.plan is not None
    assert first.plan.encode() == second.plan.encode() == plan.encode()
    for ours, theirs in zip(events, first.events, strict=True):
        assert type(ours) is type(theirs)
    assert first.events[0] == Clock(12)
    back = first.events[1].request  # type: ignore[union-attr]
    assert back.prompt.tolist() == [1, 2, 3]
    assert (back.id, back.stop_ids, back.priority) == ("a", (2, 3), 5)
    assert back.extra_args == {"a": [1, {"b": None}]}
    assert (back.user, back.adapter, back.namespace) == ("someone", "lora", "x")
    assert (
        back.wait_for_sample
        and back.prompt_logprobs
        and (back.max_tokens, back.min_tokens) == (4, 0)
    )
    assert first.events[2].counts is None and first.events[3].counts.tolist() == [0, 1, 2]  # type: ignore[union-attr]
    assert first.events[4] == Aborted("b", "stop")


def test_replaying_imports_no_torch(tmp_path: Path) -> None:
    path = tmp_path / "run.recording"
    record_run(path, make_run_limits(), make_requests(10), 50)
    script = (
        "import sys; from headstock.cli.main import main; code = main(sys.argv[1:]); "
        "print('torch' in sys.modules); sys.exit(code)"
    )
    command = [sys.executable, "-c", script, "replay", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    assert done.stdout.endswith("identical\nFalse\n")


def test_the_header_makes_the_same_limits() -> None:
    limits = make_run_limits(recompute=True)
    made = restore_limits(make_run_header(limits))

    assert type(made.policy) is type(limits.policy) and made.schedule is limits.schedule
    for name in (
        "max_rows",
        "max_len",
        "page_size",
        "num_pages",
        "groups",
        "recompute",
        "scheduler",
    ):
        assert getattr(made, name) == getattr(limits, name)


def test_a_recording_of_the_version_before_replays(capsys: pytest.CaptureFixture[str]) -> None:
    # Made by headstock 0.1.0 of 2026-11-22: three prompts of the demo model, two that begin alike.
    path = Path(__file__).with_name("version_3.recording")
    recording = read_recording(path)

    assert {type(event) for each in recording.read_steps() for event in each.events} == {
        Arrived,
        Sampled,
    }
    assert main(["replay", str(path), "--check"]) == 0
    assert capsys.readouterr().out == "14 steps, identical\n"
