"""Grammars that hang, crash or eat memory are refused, and the next ones are not."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from toy_engine import EngineHarness, Toys, expected, request
from toy_grammar import END, ToyEngine, follow_rules

from headstock import RequestError, SamplingParams
from headstock.grammar.compiler import GrammarCompiler
from headstock.grammar.trial import TrialPool
from headstock.scheduler import Request
from headstock.spi import GrammarKind, Vocabulary
from headstock.structured_outputs import StructuredOutputsParams


def ruled(name: str, rule: str) -> Request:
    """A request whose answer follows a rule."""
    params = SamplingParams(temperature=0.0, structured_outputs={"grammar": rule})
    return request(name, [1, 2, 3], 30, stop_ids=(END,), params=params)


@pytest.mark.feature("W5")
def test_what_harms_a_compiler_is_refused_and_others_go_on(toys: Toys) -> None:
    engine = toys.engine(grammar="toy-rules", grammar_timeout=60)
    harness = EngineHarness(engine)
    harness.submit(request("other", [5, 6, 7], 40))
    for _ in range(4):
        harness.step()
    messages = {
        "no-such-rule": "no rule is called no-such-rule",
        "crash": "takes too much memory to compile, or crashes its compiler",
        "eat": "takes too much memory to compile",
        "raise": "TypeError",
        "9 fails 0": "too complex",
        "9 fails 7": "too complex",
    }
    for rule, message in messages.items():
        with pytest.raises(RequestError, match=message):
            harness.submit(ruled(rule, rule))
    harness.submit(ruled("right", "7"))
    harness.drain()
    engine.close()

    assert harness.outputs["other"] == expected(harness.requests["other"])
    assert harness.outputs["right"] == follow_rules(harness.requests["right"], 7)


@pytest.mark.feature("W5")
def test_what_takes_too_long_to_compile_is_refused_and_others_go_on(toys: Toys) -> None:
    engine = toys.engine(grammar="toy-rules", grammar_timeout=0.7)
    harness = EngineHarness(engine)
    harness.submit(request("other", [5, 6, 7], 40))
    with pytest.raises(RequestError, match=r"takes more than 0.7 s to compile"):
        harness.submit(ruled("hang", "hang"))
    harness.drain()
    engine.close()

    assert harness.outputs["other"] == expected(harness.requests["other"])


class HeldTrial:
    """A trial of grammars that are held until they may end."""

    def __init__(self) -> None:
        self.tried: list[str] = []
        self.began, self.may_end = threading.Event(), threading.Event()

    def check(self, kind: GrammarKind, text: str) -> None:
        self.tried.append(text)
        if text == "9":
            self.began.set()
            assert self.may_end.wait(600)

    def close(self) -> None:
        self.tried.append("closed")


@pytest.mark.feature("W5")
def test_a_grammar_that_takes_long_leaves_room_for_others() -> None:
    first, second, third = trials = [HeldTrial() for _ in range(3)]
    pool = TrialPool(trials)
    with ThreadPoolExecutor(1) as threads:
        pool.check(GrammarKind.GRAMMAR, "1")
        held = threads.submit(pool.check, GrammarKind.GRAMMAR, "9")
        assert first.began.wait(600)
        for text in "23":
            pool.check(GrammarKind.GRAMMAR, text)
        assert not held.done()
        first.may_end.set()
        held.result(600)
    pool.check(GrammarKind.GRAMMAR, "4")
    pool.close()
    assert first.tried == ["1", "9", "4", "closed"]
    assert (second.tried, third.tried) == (["2", "3", "closed"], ["closed"])


def test_a_new_grammar_of_many_requests_is_tried_once() -> None:
    trial = HeldTrial()
    vocabulary = Vocabulary(tokenizer_file="", size=50, end_ids=())
    compiler = GrammarCompiler("toy-rules", lambda: ToyEngine(vocabulary), trial)
    params = StructuredOutputsParams(grammar="9")
    with ThreadPoolExecutor(4) as threads:
        several = [threads.submit(compiler.compile, params) for _ in range(4)]
        assert trial.began.wait(600)
        compiler.compile(StructuredOutputsParams(grammar="8"))  # waits for none of them
        trial.may_end.set()
        assert len({id(each.result(600)) for each in several}) == 1
    assert trial.tried == ["9", "8"]
