"""Proposers through whole engines: the very same tokens, what is counted, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import toy_proposer
from attrs import evolve
from often import often
from toy_engine import (
    EngineHarness,
    Toys,
    expected,
    installed,
    random_requests,
    random_settings,
    request,
)

from headstock import SamplingParams
from headstock.cli.main import main
from headstock.engine.drafting import (
    Drafting,
    MadeDrafts,
    SampledRows,
    accept_drafts,
    read_verified,
)
from headstock.engine.engine import Engine
from headstock.engine.output_tracker import OutputTracker
from headstock.engine.tracked_request import DraftHistory, TrackedRequest
from headstock.errors import CannotRun, PluginBroken, UsageError
from headstock.execution.abstract_executor import Pending
from headstock.record.file import read_recording
from headstock.scheduler import Plan, Request, Sampled
from headstock.spi import Sample
from headstock.spi.arrays import Ints
from headstock_conformance.scheduler.toy_device import VOCAB

SIZES = {"max_running_requests": 8, "max_batch_tokens": 40, "num_pages": 60}
RIGHT = ("guess.right=1.0", "guess.asked=1.0")


@pytest.fixture
def toys(tmp_path: Path) -> Iterator[Toys]:
    """The toy model and its parts."""
    with installed(tmp_path) as toys_folder:
        yield toys_folder


def run(toys: Toys, requests: Sequence[Request], **settings: Any) -> EngineHarness:
    """All requests through one engine, which is closed."""
    engine = toys.engine(**settings)
    try:
        return EngineHarness(engine).run(requests)
    finally:
        engine.close()


@pytest.mark.feature("T6", "S18", "P8", "R9")
@pytest.mark.parametrize("seed", often(1, range(16)))
def test_the_same_tokens_with_a_proposer_whatever_the_engine_and_the_request(
    toys: Toys, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    settings = random_settings(rng) | {"runner": ("eager", "rerun")[seed % 2]}
    if settings.get("paged_attn") == "off":
        settings["runner"] = "eager"
    requests = [
        evolve(one, wait_for_sample=bool(rng.random() < 0.1)) for one in random_requests(rng, 24)
    ]
    plain = run(toys, requests, **settings)
    drafted = run(toys, requests, **settings, proposer="guess")

    assert drafted.outputs == plain.outputs and drafted.reasons == plain.reasons
    assert drafted.engine.stats().accepted_draft_tokens > 0


@pytest.mark.feature("V11")
@pytest.mark.parametrize("seed", often(1, range(8)))
def test_states_go_back_to_what_was_accepted(toys: Toys, seed: int) -> None:
    rng = np.random.default_rng(seed)
    settings = random_settings(rng) | {"runner": ("eager", "rerun")[seed % 2]}
    settings |= {"state": True, "snapshot_tokens": 32, "debug_canary": True}
    if settings.get("paged_attn") == "off":
        settings["runner"] = "eager"
    requests = random_requests(rng, 24)
    plain = run(toys, requests, **settings)
    drafted = run(toys, requests, **settings, proposer="guess")

    assert drafted.outputs == plain.outputs and drafted.reasons == plain.reasons
    stats = drafted.engine.stats()
    assert 0 < stats.accepted_draft_tokens < stats.draft_tokens


@pytest.mark.feature("V11")
def test_right_drafts_of_models_with_states_spare_steps(toys: Toys) -> None:
    requests = [request(str(n), range(n, n + 9), 40) for n in range(2)]
    plain = run(toys, requests, **SIZES, state=True)
    drafted = run(toys, requests, **SIZES, state=True, proposer="guess", opt=RIGHT)

    assert drafted.outputs == plain.outputs
    assert drafted.engine.stats().steps < plain.engine.stats().steps * 0.75


@pytest.mark.feature("T6", "G2")
@pytest.mark.parametrize("overlap", often(1, [True, False]))
def test_preempted_rows_and_replayed_steps_among_prompts_give_the_same_tokens(
    toys: Toys, overlap: bool
) -> None:
    requests = random_requests(np.random.default_rng(3), 40)
    sizes = SIZES | {"num_pages": 44, "overlap": overlap}
    plain, *drafted = [
        run(toys, requests, **sizes),
        run(toys, requests, **sizes, proposer="guess", runner="eager"),
        run(toys, requests, **sizes, proposer="guess", runner="rerun"),
    ]
    for harness in drafted:
        assert harness.outputs == plain.outputs and harness.reasons == plain.reasons
        assert harness.engine.stats().preemptions > 0
    eager, replayed = (harness.engine.stats() for harness in drafted)
    assert eager.replayed_verify_steps == 0 < eager.verify_steps
    # Without penalties every such step has a graph: its rows verify, or prompts run beside them.
    assert replayed.replayed_verify_steps == replayed.verify_steps


def test_every_accepted_token_has_its_log_probabilities(toys: Toys) -> None:
    params = SamplingParams(temperature=0.8, seed=3, logprobs=2, max_tokens=30)
    requests = [
        request("warm", range(9), 30, params=params),
        request("greedy", range(4, 20), 30, params=evolve(params, temperature=0.0)),
        request(
            "prompt",
            range(7, 30),
            30,
            params=evolve(params, temperature=0.0, prompt_logprobs=1),
            prompt_logprobs=True,
        ),
    ]
    answers = []
    for settings in ({}, {"proposer": "guess", "opt": RIGHT}):
        for overlap in (False, True):
            engine = toys.engine(**SIZES, overlap=overlap, **settings)
            for one in requests:
                engine.submit(one)
            updates = [
                update for _ in iter(lambda e=engine: e.has_work, False) for update in engine.step()
            ]
            answers.append(
                {
                    one.id: [
                        (token, entry.token, round(entry.logprob, 4), entry.top)
                        for update in updates
                        if update.id == one.id
                        for token, entry in zip(update.tokens, update.logprobs or (), strict=True)
                    ]
                    for one in requests
                }
            )
            accepted = engine.stats().accepted_draft_tokens
            engine.close()
    assert accepted > 30
    assert all(len(entries) == 30 for entries in answers[0].values())
    assert all(token == scored for token, scored, *_ in answers[0]["warm"])
    assert answers[1:] == answers[:1] * 3


@pytest.mark.parametrize("overlap", [False, True])
def test_right_drafts_are_all_accepted_and_counted(toys: Toys, overlap: bool) -> None:
    one = request("a", range(1, 9), 40)
    harness = run(
        toys,
        [one],
        overlap=overlap,
        proposer="guess",
        opt=(*RIGHT, "guess.drafts=3"),
        runner="rerun",
    )
    stats = harness.engine.stats()

    assert harness.outputs["a"] == expected(one) and stats.output_tokens == 40
    assert stats.draft_tokens == stats.accepted_draft_tokens >= 20
    assert stats.replayed_verify_steps == stats.verify_steps
    # Every token is a draft, or the one that a step adds behind its drafts.
    assert stats.verify_steps + stats.accepted_draft_tokens + 3 >= 40
    assert harness.engine.stats().steps < 2 * 40


@pytest.mark.parametrize("overlap", often(1, [True, False]))
def test_a_row_whose_drafts_are_wrong_is_left_alone_ever_longer(toys: Toys, overlap: bool) -> None:
    one = request("a", range(1, 9), 150)
    plain, wrong = (
        run(toys, [one], overlap=overlap, **settings)
        for settings in ({}, {"proposer": "guess", "opt": ("guess.right=0.0", "guess.asked=1.0")})
    )
    stats = wrong.engine.stats()

    assert wrong.outputs == plain.outputs
    assert 2 <= stats.verify_steps <= 9
    assert stats.steps <= plain.engine.stats().steps + 3 * stats.verify_steps


def test_drafts_make_no_step_larger_than_what_reading_the_weights_pays_for(toys: Toys) -> None:
    requests = [request(str(i), range(1, 9 + i), 10 + 3 * i) for i in range(20)]
    engine = toys.engine(
        max_running_requests=20,
        max_batch_tokens=64,
        num_pages=600,
        overlap=False,
        proposer="guess",
        opt=RIGHT,
    )
    sizes: list[int] = []
    execute = engine.executor.execute

    def watched(plan: Plan, new_rows: Any) -> Any:
        if len(plan.drafts) and (plan.stops - plan.starts == plan.num_drafts + 1).all():
            sizes.append(plan.num_tokens)
        return execute(plan, new_rows)

    engine.executor.execute = watched  # type: ignore[method-assign]
    EngineHarness(engine).run(requests)
    engine.close()
    assert sizes and max(sizes) <= 16


def test_a_row_that_fails_while_it_verifies_leaves_the_others_their_tokens(toys: Toys) -> None:
    requests = [request(str(i), range(1 + i, 9 + i), 30) for i in range(3)]
    harness = run(
        toys, requests, **SIZES, proposer="guess", opt=RIGHT, faults=("nan@6:1", "execute@30")
    )
    assert harness.reasons["1"] == "error"
    assert "length" in harness.reasons.values() or "error" in harness.reasons.values()


@pytest.mark.parametrize("prompts", often(1, [False, True]))
def test_a_recording_of_drafts_replays_and_names_none_of_them(
    toys: Toys, prompts: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "drafts.recording"
    settings = SIZES | {"record": str(path), "record_prompts": prompts, "proposer": "guess"}
    harness = run(toys, random_requests(np.random.default_rng(1), 24), **settings)
    steps = list(read_recording(path).read_steps())
    drafted = [step.plan for step in steps if step.plan is not None and len(step.plan.drafts)]
    events = [event for step in steps for event in step.events if isinstance(event, Sampled)]

    assert len(drafted) > 20 and any(len(event.hold) and event.hold.any() for event in events)
    shown = any(plan.drafts.any() for plan in drafted) or any(
        event.drafts.any() for event in events
    )
    assert shown is prompts
    assert main(["replay", str(path), "--check"]) == 0
    assert capsys.readouterr().out == f"{harness.engine.stats().steps} steps, identical\n"


def ints(*values: int) -> Ints:
    """An array."""
    return np.array(values, np.int32)


BREACHES = {
    "raises": (lambda tokens, room: 1 // 0, "ZeroDivisionError"),
    "exits": (lambda tokens, room: (_ for _ in ()).throw(SystemExit(0)), "SystemExit"),
    "nothing": (lambda tokens, room: None, "expected counts and drafts, got None"),
    "lists": (lambda tokens, room: ([1], [2]), "expected flat arrays of integers, got"),
    "floats": (lambda tokens, room: (ints(1), np.ones(1)), "expected flat arrays of integers, got"),
    "rows": (lambda tokens, room: (ints(1, 1), ints(1, 1)), "2 counts for 1 rows"),
    "room": (lambda tokens, room: (room + 1, np.zeros(room[0] + 1, np.int32)), "with room for"),
    "negative": (lambda tokens, room: (ints(-1), ints()), "-1 drafts for a row"),
    "sum": (lambda tokens, room: (ints(1), ints(1, 2)), "2 drafts where its counts say 1"),
    "vocabulary": (lambda tokens, room: (ints(1), ints(50)), "token 50, which is not in"),
    "below": (lambda tokens, room: (ints(1), ints(-1)), "token -1, which is not in"),
    "writes": (lambda tokens, room: tokens[0].fill(0), "read-only"),
}


@pytest.mark.parametrize("breach", BREACHES)
def test_a_proposer_that_breaks_a_rule_is_named(
    toys: Toys, breach: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    propose, wanted = BREACHES[breach]
    monkeypatch.setattr(
        toy_proposer.ToyProposer, "propose", lambda self, tokens, room, ids: propose(tokens, room)
    )
    engine = toys.engine(**SIZES, proposer="guess")
    with pytest.raises(PluginBroken, match=f"the proposer 'guess' .*{wanted}"):
        EngineHarness(engine).run([request("a", range(9), 30)])
    engine.close()


@pytest.mark.parametrize(
    ("settings", "error", "wanted"),
    [
        ({"proposer": "gues"}, UsageError, "did you mean guess"),
        (
            {"proposer": "guess", "kv_cache": False},
            CannotRun,
            r"\(--kv-cache\) off .* leave out one",
        ),
        (
            {"proposer": "guess", "opt": ("guess.drafts=16",)},
            PluginBroken,
            "max_drafts: expected 1 to 15, got 16",
        ),
        (
            {"proposer": "guess", "opt": ("guess.drafts=0",)},
            PluginBroken,
            "max_drafts: expected 1 to 15, got 0",
        ),
        ({"opt": ("guess.drafts=2",)}, UsageError, "no chosen plugin has that name"),
    ],
    ids=str,
)
def test_what_cannot_serve_is_refused_before_weights_load(
    toys: Toys, settings: dict[str, Any], error: type[Exception], wanted: str
) -> None:
    with pytest.raises(error, match=wanted):
        toys.engine(**settings)


def test_acceptance_ends_at_the_first_draft_that_differs_from_the_sample_before_it() -> None:
    plan = Plan(
        number=0,
        num_decode=1,
        rows=ints(4, 1, 2, 3),
        admission_ids=ints(1, 2, 3, 4),
        starts=ints(5, 5, 5, 5),
        stops=ints(6, 8, 9, 7),
        num_logits=ints(1, 3, 4, 2),
        samples=ints(1, 1, 1, 1),
        num_drafts=ints(0, 2, 3, 1),
        drafts=ints(7, 8, 7, 9, 7, 6),
    )
    samples = np.array([3, 7, 8, 9, 7, 1, 7, 7, 5, 0])
    taken = accept_drafts(plan, plan.last_logits, np.arange(4), samples)
    assert taken.counts.tolist() == [1, 3, 2, 1]
    assert taken.tokens.tolist() == [3, 7, 8, 9, 7, 1, 5]
    some = accept_drafts(plan, plan.last_logits, np.array([0, 2]), samples)
    assert (some.counts.tolist(), some.tokens.tolist()) == ([1, 2], [3, 7, 1])


def test_drafts_that_the_device_alone_knew_are_those_that_the_step_verified() -> None:
    plan = Plan(
        number=0,
        num_decode=1,
        rows=ints(4, 1, 2),
        admission_ids=ints(1, 2, 3),
        starts=ints(5, 5, 5),
        stops=ints(6, 8, 7),
        num_logits=ints(1, 3, 2),
        samples=ints(1, 1, 1),
        num_drafts=ints(0, 2, 1),
        drafts=ints(-1, -1, 6),
    )
    sample = Sample(
        tokens=torch.tensor([3, 7, 8, 9, 6, 1]),
        healthy=torch.ones(6, dtype=torch.bool),
        verified=torch.tensor([0, 0, 7, 5, 0, 6]),
    )
    known = read_verified(plan, plan.last_logits, sample)
    assert known.drafts.tolist() == [7, 5, 6]
    taken = accept_drafts(known, plan.last_logits, np.arange(3), sample.tokens.numpy())
    assert (taken.counts.tolist(), taken.tokens.tolist()) == ([1, 2, 2], [3, 7, 8, 6, 1])
    with pytest.raises(PluginBroken, match=r"expected Sample\.verified"):
        read_verified(plan, plan.last_logits, evolve(sample, verified=None))
    exact = evolve(plan, drafts=ints(7, 8, 6))
    assert read_verified(exact, plan.last_logits, evolve(sample, verified=None)) is exact


class Making(Pending):
    """A step whose model makes these drafts.   num_waits: how often they were waited for"""

    has_drafts = True

    def __init__(self, drafts: list[list[int]]) -> None:
        self.drafts = torch.tensor(drafts)
        self.num_waits = 0

    def wait(self) -> Sample:
        raise NotImplementedError

    def wait_drafts(self) -> torch.Tensor:
        self.num_waits += 1
        return self.drafts


def test_the_host_waits_for_drafts_of_the_model_only_where_masks_follow_them() -> None:
    proposer = toy_proposer.ToyProposer(toy_proposer.ToyOptions())
    tracker = OutputTracker()
    limits: Any = SimpleNamespace(max_drafts=3)
    drafting = Drafting(proposer, "own", limits, VOCAB, 16, tracker, by_model=True)
    for row in range(3):
        tracked = TrackedRequest(request(f"{row}", [1], 1), True, np.ones(1, np.int64), 0.0)
        # The last row has two tokens to go, of which one may be a draft.
        tracked.drafts = DraftHistory(np.ones(24, np.int32), 18 - (row < 2), 20)
        tracker.by_admission_id[row] = tracked
    rows = np.arange(3, dtype=np.int32)
    plan: Any = SimpleNamespace(admission_ids=rows)
    ones = np.ones_like(rows)
    sampled = SampledRows(rows, rows, ones, np.zeros_like(rows), ones)

    step = Making([[9] * 3, [4, 5, 6], [7, 7, 7], [8, 8, 8]])
    made = MadeDrafts(step, np.array([1, 2, 3]))
    event = drafting.make_event(sampled, None, made)
    assert (event.draft_counts.tolist(), event.drafts.tolist()) == ([1, 1, 0], [-1, -1])
    assert not drafting.needs_drafts(plan) and not step.num_waits

    followed: Any = object()
    tracker.by_admission_id[1].followed = followed
    tracker.num_followed = 1
    assert drafting.needs_drafts(plan)
    tracker.by_admission_id[0].drafts = DraftHistory(np.ones(24, np.int32), 5, 20)
    tracker.by_admission_id[1].drafts = DraftHistory(np.ones(24, np.int32), 5, 20)
    event = drafting.make_event(sampled, None, made)
    assert event.draft_counts.tolist() == [3, 3, 0]
    assert event.drafts.tolist() == [-1, -1, -1, 7, 7, 7] and step.num_waits == 1


@pytest.mark.parametrize("others", [0, 1])
def test_a_row_is_held_no_longer_when_there_is_no_room_for_drafts(others: int) -> None:
    limits: Any = SimpleNamespace(max_drafts=3)
    proposer = toy_proposer.ToyProposer(toy_proposer.ToyOptions())
    tracker = OutputTracker()
    drafting = Drafting(proposer, "guess", limits, VOCAB, 16, tracker)
    lengths = [18] + [5] * others  # the first row has one token to go
    for row, length in enumerate(lengths):
        drafts = DraftHistory(np.ones(24, np.int32), length, 20, is_held=True)
        tracked = TrackedRequest(request(f"{row}", [1], 1), True, np.ones(1, np.int64), 0.0)
        tracked.drafts = drafts
        tracker.by_admission_id[row] = tracked
    rows = np.arange(1 + others, dtype=np.int32)
    ones = np.ones_like(rows)
    sampled = SampledRows(rows, rows, ones, np.zeros_like(rows), ones)
    event = drafting.make_event(sampled, None)
    assert len(event.hold) == len(rows) and not event.hold.any()
    assert not any(each.drafts.is_held for each in tracker.by_admission_id.values())


def test_without_a_proposer_nothing_of_it_is_made(toys: Toys) -> None:
    engine: Engine = toys.engine()
    assert engine.drafting is None and engine.limits.max_drafts == 0
    assert "| proposer" not in "\n".join(engine.summary.lines())
    engine.close()
    engine = toys.engine(proposer="guess")
    assert "| proposer guess" in "\n".join(engine.summary.lines())
    engine.close()
