"""What requests give plugins whose operations read it: pages are shared by equal values alone."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy_lift
from attrs import evolve
from core.faults.conftest import crash_reports, toys
from hypothesis import given
from hypothesis import strategies as st
from often import often
from toy_engine import EngineHarness, Toys, request, to_pooling

from headstock.cli.main import main
from headstock.engine.engine import Engine
from headstock.record.file import read_recording
from headstock.scheduler import Arrived, Request
from headstock.selection.processors import SelectedProcessor, digest_forward_values
from headstock.spi import LogitColumn, Runner, StepInputs
from headstock_conformance.scheduler.toy_device import hash_prefixes

__all__ = ["crash_reports", "toys"]

LIFTED = {"ops": "lifted", "logits_processors": ("lift",)}


class LiftedHarness(EngineHarness):
    """A harness that knows what lifted requests say."""

    def check_output(self, one: Request) -> None:
        """Raise AssertionError unless a request said what it says alone."""
        if one.pooling:
            states = [each % 50 for each in hash_prefixes(one.prompt + toy_lift.lift_of(one))]
            wanted = sum(states) / len(states) if one.pooling == "mean" else states[-1]
            assert self.embeddings[one.id] == pytest.approx((wanted,), abs=1e-4), one.id
            return
        assert self.outputs[one.id] == toy_lift.lifted_answer(one), one.id


def lifted(name: str, prompt: Sequence[int], max_tokens: int, lift: int | None) -> Request:
    """A request that lifts its tokens, or gives the plugin nothing."""
    return request(name, prompt, max_tokens, extra_args=None if lift is None else {"lift": lift})


def make_requests(count: int) -> list[Request]:
    """Requests that begin alike and differ in what they give the plugin."""
    rng = np.random.default_rng(count)
    shared = rng.integers(0, 50, 60)
    requests = []
    for number in range(count):
        tokens = np.concatenate(
            [shared[: int(rng.integers(20, 60))], rng.integers(0, 50, int(rng.integers(0, 9)))]
        )
        lift = (None, 0, 1, 2, 40)[int(rng.integers(0, 5))]
        one = lifted(str(number), tokens, int(rng.integers(1, 20)), lift)
        one = evolve(one, priority=number // 10)
        requests.append(to_pooling(one, "last") if number % 6 == 5 else one)
    return requests


SETTINGS: dict[str, dict[str, Any]] = {
    "radix": {},
    "preempted": {"num_pages": 40, "max_batch_tokens": 24},
    "drafts": {"proposer": "ngram"},
    "shared prefixes": {"attn": "toy-sharing"},
    "chunked": {"max_batch_tokens": 11},
    "naive": {"cache_type": "naive"},
    "contiguous": {"paged_attn": "off", "page_size": "auto", "num_pages": 4},
}


@pytest.mark.parametrize("runner", often(1, ["rerun", "eager"]))
@pytest.mark.parametrize("overlap", often(1, [True, False]))
@pytest.mark.parametrize("name", often(4, SETTINGS))
def test_requests_of_other_values_say_what_they_say_alone(
    toys: Toys, name: str, overlap: bool, runner: str
) -> None:
    if name == "contiguous":
        runner = "eager"
    settings = {"overlap": overlap, "runner": runner, **LIFTED, **SETTINGS[name]}
    engine = toys.engine(**settings)
    harness = LiftedHarness(engine)
    # Later ones go first, and preempt earlier ones where pages are short.
    for one in make_requests(30):
        harness.submit(one)
        harness.step()
    harness.drain()
    stats = engine.stats()
    engine.close()

    assert set(harness.reasons.values()) == {"stop", "length"}
    assert stats.preemptions > 0 or name != "preempted"


@pytest.mark.parametrize("cache", ["radix", "naive"])
def test_pages_are_shared_by_requests_of_equal_values_alone(toys: Toys, cache: str) -> None:
    engine = toys.engine(**LIFTED, cache_type=cache)
    found: list[int] = []
    for number, lift in enumerate((None, 3, 4, 0, None, 3, 4)):
        engine.submit(lifted(str(number), range(40), 4, lift))
        updates = [update for _ in iter(lambda: engine.has_work, False) for update in engine.step()]
        found.append(max(update.cached_tokens or 0 for update in updates))
    engine.close()

    # A request that gives a neutral value is as one that gives none.
    assert found == ([0, 0, 0, 36, 36, 36, 36] if cache == "radix" else [0] * 7)


def test_a_request_does_not_wait_for_a_prefix_of_other_values(toys: Toys) -> None:
    engine = toys.engine(**LIFTED, overlap=False, max_batch_tokens=40, num_pages=200)
    for number, lift in enumerate((None, 5, None, 5)):
        engine.submit(lifted(str(number), range(20), 4, lift))
    engine.step()
    running = [entry.request.id for entry in engine.state.requests_by_row if entry is not None]
    engine.close()

    assert running == ["0", "1"]


def test_values_reach_operations_though_a_graph_samples_by_other_settings(toys: Toys) -> None:
    """Steps that sample beside graphs replay the forward pass all the same."""
    engine = toys.engine(runner="rerun", **LIFTED)
    for number in range(3):
        one = lifted(str(number), range(9), 12, 7 + number)
        # Penalties that no token meets: the answers are the same, and no graph samples so.
        engine.submit(evolve(one, params=evolve(one.params, logprobs=1)))
        updates = [update for _ in iter(lambda: engine.has_work, False) for update in engine.step()]
        said = [token for update in updates for token in update.tokens]
        assert said == toy_lift.lifted_answer(one)
    replayed = engine.stats().replayed_steps
    engine.close()

    assert replayed > 20


def read_undeclared(self: toy_lift.Lift) -> Mapping[str, LogitColumn]:
    """Columns of a plugin that does not say that operations read them."""
    return {"by": LogitColumn(neutral=0, dtype="int64")}


@pytest.mark.parametrize("runner", ["eager", "rerun"])
def test_what_is_read_without_a_declaration_fails_by_name(
    toys: Toys,
    runner: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(toy_lift.Lift, "columns", property(read_undeclared))
    engine = toys.engine(runner=runner, **LIFTED)
    harness = EngineHarness(engine)
    harness.submit(lifted("a", range(9), 4, 3))
    harness.drain()
    engine.close()

    assert harness.reasons == {"a": "error"}
    assert re.search("'lift' declares no column 'by' .*in_forward=True", caplog.text)


def runner_of(engine: Engine) -> Runner:
    """The engine's runner."""
    runner: Runner = getattr(engine.executor, "inner", engine.executor).runner
    return runner


def test_a_batch_that_a_runner_makes_has_the_declared_columns(toys: Toys) -> None:
    engine = toys.engine(runner="rerun", **LIFTED)
    tables = runner_of(engine).program.row_tables  # type: ignore[attr-defined]
    rows = torch.zeros(2, dtype=torch.int64)
    inputs = StepInputs.of_rows(rows, rows, 1), tables.step_inputs(2, 4)
    batches = [tables.batch(each) for each in inputs]
    for batch in batches:
        table = batch.columns.read("lift", "by")
        assert table is not None and table[tables.padding_row] == 0
        assert batch.columns.read("another", "by") is None
    engine.close()


@pytest.mark.parametrize("prompts", [False, True])
def test_a_recording_replays_the_namespaces_without_the_arguments(
    toys: Toys, prompts: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lifted.recording"
    engine = toys.engine(**LIFTED, record=str(path), record_prompts=prompts)
    requests = make_requests(30)
    LiftedHarness(engine).run(requests)
    digests = {engine.preparation.prepare(one).variant for one in requests}
    engine.close()
    arrived = [
        event.request
        for step in read_recording(path).read_steps()
        for event in step.events
        if isinstance(event, Arrived)
    ]
    capsys.readouterr()
    assert main(["replay", str(path), "--check"]) == 0
    assert capsys.readouterr().out.endswith("steps, identical\n")

    def partition(names: Sequence[str]) -> list[int]:
        """Which of the requests are in one namespace, without its name."""
        return [names.index(name) for name in names]

    assert partition([one.variant for one in arrived]) == partition(
        [str(toy_lift.lift_of(one)) for one in requests]
    )
    assert ({one.variant for one in arrived} == digests) is prompts
    assert any(one.extra_args for one in arrived) is prompts
    assert prompts or json.dumps("lift") not in path.read_bytes().decode("latin-1")


VALUES = st.dictionaries(
    st.sampled_from(["a", "b", "c"]), st.sampled_from([0.0, -0.0, 1.0, 2.0]), max_size=3
)


@given(st.lists(st.none() | VALUES, min_size=2, max_size=2), st.booleans())
def test_digests_are_equal_where_all_that_operations_read_is(
    given: list[dict[str, float] | None], declared: bool
) -> None:
    columns = {name: LogitColumn(neutral=0.0, in_forward=declared and name != "c") for name in "ab"}
    columns["c"] = LogitColumn(neutral=0.0)
    selected = SelectedProcessor(spec=toy_lift.spec(), processor=toy_lift.Lift(), columns=columns)
    digests = [digest_forward_values([selected], [values]) for values in given]
    read = [
        [np.float32((values or {}).get(name, 0.0)).tobytes() if declared else b"" for name in "ab"]
        for values in given
    ]

    assert (digests[0] == digests[1]) is (read[0] == read[1])
    neutral = [np.float32(0.0).tobytes() if declared else b""] * 2
    assert (digests[0] == "") is (read[0] == neutral)


NAMES = st.sampled_from(["", "\0", "\x001:a", "1:a", "a", "0:", "\x000:0:"])


@given(st.lists(st.tuples(NAMES, NAMES, NAMES), min_size=2, max_size=2))
def test_namespaces_of_other_adapters_variants_or_callers_differ(
    named: list[tuple[str, str, str]],
) -> None:
    spaces = [
        request("a", [1], adapter=adapter, variant=variant, namespace=namespace).prefix_namespace
        for adapter, variant, namespace in named
    ]
    assert (spaces[0] == spaces[1]) is (named[0] == named[1])
