"""Answers that follow a rule, beside others, in every kind of step, as worked out by hand."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from often import often
from toy_engine import GREEDY, EngineHarness, Toys, expected, request
from toy_grammar import END, ToyEngine, ToyMatcher, follow_rules, is_allowed

from headstock import RequestError, SamplingParams
from headstock.engine.engine import Engine
from headstock.grammar.compiler import GrammarCompiler
from headstock.record import read_recording, replay_recording, restore_limits
from headstock.scheduler import Request
from headstock.spi import Sample, Step, Vocabulary
from headstock.structured_outputs import ReasoningTokens, StructuredOutputsParams

VOCABULARY = Vocabulary(tokenizer_file="", size=50, end_ids=())


@pytest.fixture(autouse=True)
def no_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules are not tried in another process first, which takes a second to start."""
    monkeypatch.setattr("headstock.grammar.trial.TrialProcess.check", lambda self, kind, text: None)


def ruled(
    name: str,
    prompt: Any,
    max_tokens: int,
    rule: str,
    reasoning: ReasoningTokens | None = None,
    **params: Any,
) -> Request:
    """A request whose answer follows a rule, after reasoning if there is any."""
    settings = {"temperature": 0.0} | params
    outputs = StructuredOutputsParams(grammar=rule, after_reasoning=reasoning)
    return request(
        name,
        prompt,
        max_tokens,
        stop_ids=(END,),
        params=SamplingParams(structured_outputs=outputs, **settings),
    )


def draw_reasoning(prompt: Any, seed: int) -> ReasoningTokens:
    """Tokens around reasoning that the toy model writes after this prompt."""
    free = expected(request("free", prompt, 12))
    kept = [token for token in free if token != END]
    end = next(token for token in kept[seed % 7 + 1 :] if token != kept[0])
    return ReasoningTokens(start=None if seed % 4 else kept[0], end=end)


def make_requests(count: int) -> list[Request]:
    """Requests of which two in three follow a rule; some prompts are longer than a step."""
    rng = np.random.default_rng(count)
    requests = []
    for i in range(count):
        prompt = rng.integers(0, END, int(rng.integers(1, 70)))
        most = int(rng.integers(3, 30))
        if i % 3:
            reasoning = draw_reasoning(prompt, i) if i % 3 == 2 else None
            requests.append(ruled(str(i), prompt, 40 if i % 2 else most, str(most), reasoning))
        else:
            requests.append(request(str(i), prompt, most))
    return requests


def right_answers(requests: list[Request]) -> dict[str, list[int]]:
    """What each request must say."""
    return {
        one.id: expected(one)
        if one.params == GREEDY
        else follow_rules(
            one,
            int(one.params.structured_outputs.grammar),
            one.params.structured_outputs.after_reasoning,
        )
        for one in requests
    }


@pytest.mark.feature("R4")
@pytest.mark.parametrize(
    ("runner", "overlap", "proposer", "pages"),
    often(
        2,
        [
            ("rerun", True, "guess", 60),
            ("eager", True, "off", 100),
            ("rerun", True, "off", 60),
            ("rerun", True, "guess", 100),
            ("eager", False, "guess", 60),
            ("rerun", False, "guess", 60),
            ("rerun", False, "off", 100),
            ("eager", True, "guess", 60),
        ],
    ),
)
def test_answers_follow_their_rules_and_others_are_as_without(
    toys: Toys, runner: str, overlap: bool, proposer: str, pages: int
) -> None:
    requests = make_requests(24)
    engine = toys.engine(
        grammar="toy-rules",
        runner=runner,
        overlap=overlap,
        proposer=proposer,
        num_pages=pages,
        max_batch_tokens=40,
    )
    steps = watch(engine)
    harness = EngineHarness(engine)
    for one in requests[:12]:
        harness.submit(one)
    for _ in range(12):
        harness.step()
    # They preempt some of those that run.
    harness.run([evolve(one, priority=1) for one in requests[12:]])
    stats = engine.stats()
    engine.close()

    assert harness.outputs == right_answers(requests)
    assert stats.preemptions > 0
    if proposer == "guess":
        assert stats.verify_steps > 5
    if runner == "rerun":
        assert steps["mask"] > 5 and steps["plain"] > 0, steps


def watch(engine: Engine) -> Counter[str]:
    """Counts replays with masks and without."""
    runner: Any = getattr(engine.executor, "inner", engine.executor).runner
    counts: Counter[str] = Counter()
    if not hasattr(runner, "sampling"):
        return counts
    find = runner.sampling.kinds.find

    def found(settings: frozenset[str]) -> frozenset[str]:
        counts["mask" if "mask" in settings else "plain"] += 1
        kind: frozenset[str] = find(settings)
        return kind

    runner.sampling.kinds = SimpleNamespace(first=runner.sampling.kinds.first, find=found)
    return counts


@pytest.mark.feature("R4")
@pytest.mark.parametrize("runner", often(1, ["rerun", "eager"]))
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.3, "seed": 5},
        {"temperature": 1.3, "seed": 5, "top_k": 20, "min_p": 0.001},
        {"repetition_penalty": 1.2, "logprobs": 2},
    ],
)
def test_every_kind_of_sampling_keeps_to_the_rules(
    toys: Toys, runner: str, params: dict[str, Any]
) -> None:
    requests = [ruled(str(i), range(i, 9 + i), 30, "12", **params) for i in range(5)]
    answers = []
    for proposer in ("off", "guess"):
        engine = toys.engine(grammar="toy-rules", runner=runner, proposer=proposer)
        harness = EngineHarness(engine).run(requests)
        engine.close()
        answers.append(harness.outputs)
        for answer in harness.outputs.values():
            assert len(answer) == 13 and answer[-1] == END
            assert all(is_allowed(answer[:i], token) for i, token in enumerate(answer[:-1]))

    assert answers[0] == answers[1]
    assert len(set(map(tuple, answers[0].values()))) > 1


@pytest.mark.feature("R4")
@pytest.mark.parametrize("overlap", often(1, [True, False]))
@pytest.mark.parametrize("runner", ["eager", "rerun"])
def test_an_answer_that_cannot_be_followed_fails_alone(
    toys: Toys, runner: str, overlap: bool, caplog: pytest.LogCaptureFixture
) -> None:
    requests = make_requests(6)
    wrong = evolve(ruled("wrong", range(3, 9), 30, "25 fails 20"))
    engine = toys.engine(grammar="toy-rules", runner=runner, overlap=overlap)
    harness = UncheckedHarness(engine)
    harness.run([*requests, wrong])
    again = EngineHarness(engine).run([ruled("again", range(3, 9), 30, "6")])
    engine.close()

    assert harness.reasons["wrong"] == "error"
    assert harness.outputs["wrong"] == follow_rules(wrong, 25)[:20]
    assert {name: harness.outputs[name] for name in right_answers(requests)} == right_answers(
        requests
    )
    assert again.outputs["again"] == follow_rules(again.requests["again"], 6)
    assert any("too complex" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("owner", "method", "answer", "reason"),
    [
        (ToyMatcher, "advance", None, "TypeError"),
        (ToyMatcher, "advance", 99, "advance returned 99"),
        (ToyMatcher, "fill_mask", None, "fill_masks returned (None,)"),
        (ToyMatcher, "fill_mask", False, "no token may follow, and the text may not end"),
        (ToyEngine, "fill_masks", [], "fill_masks returned [] for 1 matchers"),
        (ToyEngine, "fill_masks", [True], "fill_masks returned True"),
    ],
)
def test_an_engine_that_answers_nonsense_costs_the_answer_alone(
    toys: Toys,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    owner: type,
    method: str,
    answer: object,
    reason: str,
) -> None:
    monkeypatch.setattr(owner, method, lambda *arguments: answer)
    engine = toys.engine(grammar="toy-rules")
    harness = UncheckedHarness(engine)
    requests = make_requests(1)
    harness.run([*requests, ruled("wrong", range(3, 9), 30, "6")])
    engine.close()

    assert harness.reasons["wrong"] == "error"
    assert right_answers(requests).items() <= harness.outputs.items()
    messages = [record.getMessage() for record in caplog.records]
    assert any(reason in each and "toy-rules" in each for each in messages), messages


def test_what_ends_no_answer_of_this_model_is_left_out(toys: Toys) -> None:
    """A tokenizer may have more ids than the model has scores."""
    engine = toys.engine(grammar="toy-rules")
    requests = [evolve(each, stop_ids=(END, 900)) for each in make_requests(3) if each.stop_ids]
    harness = EngineHarness(engine).run([*requests, request("other", [1, 2], 9)])
    with pytest.raises(RequestError, match="needs a token that ends an answer"):
        engine.submit(evolve(requests[0], stop_ids=(900,)))
    engine.close()

    assert requests and {one.id: harness.outputs[one.id] for one in requests} == right_answers(
        requests
    )


def leave(*arguments: object) -> None:
    """What no plugin should do."""
    raise SystemExit(3)


@pytest.mark.parametrize("method", ["advance", "fill_mask"])
def test_the_answer_says_why_it_failed_and_which_plugin_did_it(
    toys: Toys, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(ToyMatcher, method, leave)
    engine = toys.engine(grammar="toy-rules")
    harness = UncheckedHarness(engine)
    for one in (ruled("wrong", range(3, 9), 30, "6"), request("other", [1, 2], 9)):
        harness.submit(one)
    errors = [each.error for _ in range(30) for each in engine.step() if each.error]
    engine.close()

    (error,) = errors
    assert "cannot be followed" in error
    assert "the grammar plugin 'toy-rules' raised SystemExit" in error


class UncheckedHarness(EngineHarness):
    """A harness that takes any output."""

    def check_output(self, one: Request) -> None:
        """Nothing is wrong."""


def test_a_runner_that_samples_before_masks_are_there_is_blamed(
    toys: Toys, caplog: pytest.LogCaptureFixture
) -> None:
    engine = toys.engine(grammar="toy-rules", runner="rerun", overlap=False)
    runner: Any = getattr(engine.executor, "inner", engine.executor).runner
    run = runner.run

    def run_unprepared(step: Step) -> Sample:
        vars(step)["prepare_sampling"] = int
        sample: Sample = run(step)
        return sample

    runner.run = run_unprepared
    harness = UncheckedHarness(engine).run([ruled("a", [1, 2], 9, "5"), request("b", [3], 9)])
    engine.close()

    assert harness.reasons == {"a": "error", "b": "error"}, "they were in one step"
    assert "sampled before prepare_sampling() was called" in caplog.text


def test_an_abort_of_an_id_before_it_is_given_ends_no_later_request_of_that_id(toys: Toys) -> None:
    engine = toys.engine(grammar="toy-rules")
    engine.abort("later")
    one = ruled("later", range(5), 20, "9")

    assert UncheckedHarness(engine).run([one]).outputs == {"later": follow_rules(one, 9)}
    engine.close()


def test_requests_that_end_leave_nothing_behind(toys: Toys) -> None:
    engine = toys.engine(grammar="toy-rules")
    harness = UncheckedHarness(engine)
    for one in make_requests(9):
        harness.submit(one)
    for _ in range(3):
        harness.step()
    for name in list(harness.requests):
        engine.abort(name)
    harness.drain()
    tracker = engine.output_tracker

    assert not tracker.requests and not tracker.by_admission_id and not tracker.num_followed
    # The rows that they had take other requests, whose tokens nothing rules.
    others = [request(f"{i}", range(i, i + 8), 12) for i in range(8)]
    ruled_one = ruled("ruled", range(5), 20, "9")
    assert EngineHarness(engine).run([*others, ruled_one]).outputs == {
        **{one.id: expected(one) for one in others},
        "ruled": follow_rules(ruled_one, 9),
    }
    engine.close()


@pytest.mark.feature("R4")
def test_a_recording_replays_without_the_grammar(toys: Toys, tmp_path: Path) -> None:
    path = tmp_path / "schedule"
    engine = toys.engine(grammar="toy-rules", proposer="guess", record=str(path))
    EngineHarness(engine).run(make_requests(12))
    engine.close()

    recording = read_recording(str(path))
    result = replay_recording(recording, restore_limits(recording.header))
    assert result.divergence is None and result.is_complete and result.steps > 10


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"min_tokens": 3}, "min_tokens cannot be combined with structured_outputs"),
        ({"allowed_token_ids": [3]}, "allowed_token_ids cannot be combined"),
        ({"ignore_eos": True}, "ignore_eos cannot be combined.*leave ignore_eos out"),
        (
            {"ignore_eos": True, "stop_token_ids": [3], "min_tokens": 2},
            "ignore_eos and min_tokens cannot be combined.*; leave ignore_eos and min_tokens out",
        ),
    ],
)
def test_what_contradicts_a_grammar_is_refused_by_name(
    toys: Toys, params: dict[str, Any], message: str
) -> None:
    engine = toys.engine(grammar="toy-rules")
    with pytest.raises(RequestError, match=message):
        engine.submit(ruled("a", range(4), 9, "5", **params))
    with pytest.raises(RequestError, match="toy-rules: no rule is called rubbish"):
        engine.submit(ruled("a", range(4), 9, "rubbish"))
    with pytest.raises(RequestError, match="needs a token that ends an answer"):
        engine.submit(evolve(ruled("a", range(4), 9, "5"), stop_ids=()))
    assert not engine.has_work
    engine.close()


def test_without_a_grammar_plugin_a_grammar_is_refused_with_the_next_move(toys: Toys) -> None:
    engine = toys.engine(grammar="off")
    with pytest.raises(RequestError, match=r"grammar \(--grammar\) off turns it off"):
        engine.submit(ruled("a", range(4), 9, "5"))
    engine.close()


def test_compiled_grammars_are_kept_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstock.grammar.compiler.MAX_CACHED", 3)

    class NoTrial:
        """Tries nothing."""

        checked: list[str] = []  # noqa: RUF012

        def check(self, kind: object, text: str) -> None:
            self.checked.append(text)

        def close(self) -> None:
            pass

    compiler = GrammarCompiler("toy-rules", lambda: ToyEngine(VOCABULARY), NoTrial())
    for text in ("1", "2", "3", "1", "4", "1", "2"):
        compiler.compile(StructuredOutputsParams(grammar=text))

    assert NoTrial.checked == ["1", "2", "3", "4", "2"]
    assert [text for _, text in compiler.compiled] == ["4", "1", "2"] and compiler.num_bytes == 3


def test_a_refusal_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    class Refusing:
        """Refuses everything."""

        def check(self, kind: object, text: str) -> None:
            tried.append(text)
            raise ValueError("it takes more than 5 s to compile")

        def close(self) -> None:
            pass

    monkeypatch.setattr("headstock.grammar.compiler.MAX_REFUSED", 2)
    compiler = GrammarCompiler("toy-rules", lambda: ToyEngine(VOCABULARY), Refusing())
    for text in ("1", "1", "2", "3", "3", "1"):
        with pytest.raises(RequestError, match="more than 5 s"):
            compiler.compile(StructuredOutputsParams(grammar=text))

    assert tried == ["1", "2", "3", "1"]
    assert compiler.has_compiled(StructuredOutputsParams(grammar="1"))
    assert not compiler.has_compiled(StructuredOutputsParams(grammar="2"))
