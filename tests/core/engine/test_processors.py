"""Logits processors in every kind of step: rows with one as worked out, others as without."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from core.faults.conftest import crash_reports, toys
from often import often
from toy_engine import GREEDY, EngineHarness, Toys, expected, request
from toy_processor import Sharpen, Shift, find_shift, shifted_answer

from headstock import RequestError, SamplingParams
from headstock.engine.engine import Engine
from headstock.errors import PluginBroken, UsageError
from headstock.execution.processor_columns import FEW_ROWS
from headstock.scheduler import Request
from headstock.spi import LogitColumn

__all__ = ["crash_reports", "toys"]

BOTH = {"logits_processors": ("shift", "sharpen")}


class UncheckedHarness(EngineHarness):
    """A harness that takes any output."""

    def check_output(self, one: Request) -> None:
        """Nothing is wrong."""


def make_requests(count: int, share: float) -> list[Request]:
    """Greedy and warm requests, of which a share is shifted and a share sharpened."""
    rng = np.random.default_rng(count)
    requests = []
    for i in range(count):
        prompt = rng.integers(0, 50, int(rng.integers(2, 50)))
        is_shifted, is_sharp = bool(rng.random() < share), bool(rng.random() < share)
        warm = i % 3 == 0
        # Odd numbers are shifted, multiples of three sharpened.
        prompt[0] = 9 if is_shifted and is_sharp else 5 if is_shifted else 6 if is_sharp else 2
        params = SamplingParams(temperature=1.0, seed=i) if warm else GREEDY
        requests.append(request(str(i), prompt, int(rng.integers(3, 25)), params=params))
    return requests


def watch(engine: Engine) -> set[frozenset[str]]:
    """The kinds of sampling that are replayed."""
    runner: Any = getattr(engine.executor, "inner", engine.executor).runner
    kinds: set[frozenset[str]] = set()
    find = runner.sampling.kinds.find

    def found(settings: frozenset[str]) -> frozenset[str]:
        kinds.add(settings)
        kind: frozenset[str] = find(settings)
        return kind

    runner.sampling.kinds = SimpleNamespace(first=runner.sampling.kinds.first, find=found)
    return kinds


@pytest.mark.feature("R3")
@pytest.mark.parametrize(
    ("overlap", "proposer", "share"),
    often(
        1,
        [
            (True, "guess", 0.3),
            (True, "off", 0.9),
            (False, "guess", 0.9),
            (True, "off", 0.3),
            (False, "off", 0.3),
            (True, "guess", 0.9),
        ],
    ),
)
def test_rows_with_a_processor_are_changed_by_it_and_others_are_as_without(
    toys: Toys, overlap: bool, proposer: str, share: float
) -> None:
    requests = make_requests(20, share)
    # Drafts need room in steps of 16 tokens.
    rows = 20 if proposer == "off" else 4
    sizes = {"max_running_requests": rows, "num_pages": 300, "max_batch_tokens": 60}
    settings = {"overlap": overlap, "proposer": proposer, **sizes}
    without = UncheckedHarness(toys.engine(overlap=overlap, **sizes)).run(requests).outputs
    answers = []
    for runner in ("eager", "rerun"):
        engine = toys.engine(runner=runner, **BOTH, **settings)
        kinds = watch(engine) if runner == "rerun" else set()
        answers.append(UncheckedHarness(engine).run(requests).outputs)
        verified = engine.stats().verify_steps
        engine.close()
        assert verified > 3 or proposer == "off"

    assert answers[0] == answers[1]
    changed = 0
    for one in requests:
        is_greedy, answer = one.params == GREEDY, answers[0][one.id]
        is_sharp = int(one.prompt[0]) % 3 == 0
        if is_greedy or is_sharp:
            # The best token alone is left, whatever the noise.
            assert answer == shifted_answer(one)
            changed += answer != without[one.id]
        elif not find_shift(one.prompt):
            assert answer == without[one.id]
    assert changed > 4
    processed = {name for kind in kinds for name in kind if "processed" in name}
    many = share > 0.5 and proposer == "off"
    assert processed >= ({"processed"} if many else {"few_processed"})


def test_more_processed_rows_than_a_few_are_all_processed(toys: Toys) -> None:
    requests = [request(str(i), [5, *range(i)], 12) for i in range(1, FEW_ROWS + 3)]
    engine = toys.engine(
        runner="rerun", max_running_requests=16, num_pages=300, logits_processors=("shift",)
    )
    kinds = watch(engine)
    harness = UncheckedHarness(engine).run(requests)
    engine.close()

    assert harness.outputs == {one.id: shifted_answer(one) for one in requests}
    assert frozenset({"processed"}) in kinds and frozenset({"few_processed"}) in kinds


@pytest.mark.feature("R3")
def test_a_row_keeps_nothing_of_the_request_before(toys: Toys) -> None:
    engine = toys.engine(runner="rerun", max_running_requests=1, logits_processors=("shift",))
    for first in (5, 2, 9, 4):
        one = request(f"{first}", [first, 3, 4], 9)
        harness = UncheckedHarness(engine).run([one])
        assert harness.outputs[one.id] == shifted_answer(one)
        assert (harness.outputs[one.id] == expected(one)) is (first % 2 == 0)
    engine.close()


def test_greedy_rows_are_spared_what_keeps_the_best_token(toys: Toys) -> None:
    engine = toys.engine(runner="rerun", logits_processors=("sharpen",))
    kinds = watch(engine)
    EngineHarness(engine).run([request(str(i), [6, i], 9) for i in range(4)])
    assert kinds == {frozenset()}
    warm = request("warm", [6, 1], 9, params=SamplingParams(temperature=1.4, seed=3))
    harness = UncheckedHarness(engine).run([warm])
    engine.close()

    assert harness.outputs["warm"] == expected(evolve(warm, params=GREEDY))
    assert frozenset({"temperature", "few_processed"}) in kinds


def test_log_probabilities_are_of_the_scores_before(toys: Toys) -> None:
    params = SamplingParams(temperature=0.0, logprobs=2)
    one = request("a", [5, 1, 2], 6, params=params)
    engine = toys.engine(logits_processors=("shift",))
    engine.submit(one)
    updates = [update for _ in range(12) for update in engine.step()]
    engine.close()

    logprobs = [each.logprob for update in updates for each in update.logprobs or ()]
    moved = find_shift(one.prompt)
    scores = -np.arange(50.0)
    likely = scores - np.log(np.exp(scores).sum())
    np.testing.assert_allclose(logprobs, [likely[moved], likely[0]] * 3, atol=1e-5)


@pytest.mark.feature("R3")
@pytest.mark.parametrize(
    ("row", "message"),
    [
        (lambda *_: {"nothing": 3}, "expected None, or values of by, begin"),
        (lambda *_: {"by": (1, 2)}, r"column 'by': expected int64 number, got "),
        (lambda *_: {"by": 1.9}, r"column 'by': expected int64 number, got 1.9"),
        (lambda *_: {"by": 2.0**70}, r"column 'by': expected int64 number, got "),
        (lambda *_: {"by": "7"}, r"column 'by': expected int64 number, got "),
        (lambda *_: 1 / 0, "'shift' raised ZeroDivisionError"),
        (lambda *_: int("x"), "'shift': invalid literal"),
    ],
)
def test_a_row_that_breaks_the_contract_costs_its_request_alone(
    toys: Toys, monkeypatch: pytest.MonkeyPatch, row: Any, message: str
) -> None:
    engine = toys.engine(logits_processors=("shift",))
    monkeypatch.setattr(Shift, "row", lambda self, *given: row(*given))
    with pytest.raises(RequestError, match=message):
        engine.submit(request("a", [5], 3))
    monkeypatch.undo()
    EngineHarness(engine).run([request("b", [2], 3)])
    engine.close()


@pytest.mark.parametrize("apply", [lambda *_: None, lambda self, logits, *_: logits[:, 1:]])
def test_scores_of_another_shape_fail_the_step_by_name(
    toys: Toys, monkeypatch: pytest.MonkeyPatch, apply: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine = toys.engine(logits_processors=("shift",))
    monkeypatch.setattr(Shift, "apply", apply)
    harness = UncheckedHarness(engine).run([request("a", [5], 3)])
    engine.close()

    assert harness.reasons == {"a": "error"}
    assert "the logits processor toy_processor.Shift: expected" in caplog.text


def test_what_a_processor_says_of_itself_is_checked(
    toys: Toys, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="names shift twice"):
        toys.engine(logits_processors=("shift", "shift"))
    monkeypatch.setattr(Sharpen, "columns", {"reach": 3})
    with pytest.raises(PluginBroken, match="'sharpen': columns and changes_argmax: expected"):
        toys.engine(logits_processors=("sharpen",))
    with pytest.raises(ValueError, match="dtype"):
        LogitColumn(neutral=0, dtype="bfloat16")  # type: ignore[arg-type]
    for neutral in ("x", None, [1.0]):
        with pytest.raises(TypeError, match="neutral"):
            LogitColumn(neutral=neutral)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"expected a whole number, got 0\.5"):
        LogitColumn(neutral=0.5, dtype="int64")


def test_a_processor_that_no_graph_can_have_costs_the_others_no_graph(
    toys: Toys, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: Shift, *_: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    with monkeypatch.context() as broken:
        broken.setattr(Shift, "apply", refuse)
        engine = toys.engine(logits_processors=("shift",), runner="rerun")
    plain = [request(str(i), [2, 3, 4], 20) for i in range(3)]
    EngineHarness(engine).run(plain)
    counts = engine.stats()
    shifted = request("shifted", [5, 3, 4], 6)
    outputs = UncheckedHarness(engine).run([shifted]).outputs
    engine.close()

    assert counts.replayed_steps > 10
    assert outputs == {"shifted": shifted_answer(shifted)}
    assert "not captured" in caplog.text and "test_processors.py" in caplog.text


def test_a_smaller_graph_is_captured_right_after_a_step_with_a_processed_row_past_its_end(
    toys: Toys, caplog: pytest.LogCaptureFixture
) -> None:
    engine = toys.engine(
        logits_processors=("shift",), runner="rerun", debug_invariants=False, overlap=False
    )
    # The last of five rows is processed, and goes on alone when the others end.
    requests = [request(str(i), [2 + 3 * (i == 4), 3, 4], 3 + 3 * (i == 4)) for i in range(5)]
    harness = UncheckedHarness(engine).run(requests)
    while not engine.late_captures.is_done:
        engine.prepare_next()
    engine.close()

    assert harness.outputs["4"] == shifted_answer(requests[4])
    assert caplog.text == ""
