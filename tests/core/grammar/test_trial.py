"""Grammars that hang, crash or eat memory are refused, and the next ones are not."""

from __future__ import annotations

import time

import pytest
from toy_engine import EngineHarness, Toys, expected, request
from toy_grammar import END, follow_rules

from headstock import RequestError, SamplingParams
from headstock.scheduler import Request


def ruled(name: str, rule: str) -> Request:
    """A request whose answer follows a rule."""
    params = SamplingParams(temperature=0.0, structured_outputs={"grammar": rule})
    return request(name, [1, 2, 3], 30, stop_ids=(END,), params=params)


@pytest.mark.feature("W5")
def test_what_harms_a_compiler_is_refused_and_others_go_on(toys: Toys) -> None:
    engine = toys.engine(grammar="toy-rules", grammar_timeout=0.7)
    harness = EngineHarness(engine)
    harness.submit(request("other", [5, 6, 7], 40))
    for _ in range(4):
        harness.step()
    messages = {
        "no-such-rule": "no rule is called no-such-rule",
        "hang": "takes more than 0.7 s to compile",
        "crash": "takes too much memory to compile, or crashes its compiler",
        "eat": "takes too much memory to compile",
        "raise": "TypeError",
    }
    for rule, message in messages.items():
        began = time.monotonic()
        with pytest.raises(RequestError, match=message):
            harness.submit(ruled(rule, rule))
        assert time.monotonic() - began < 30
    harness.submit(ruled("right", "7"))
    harness.drain()
    engine.close()

    assert harness.outputs["other"] == expected(harness.requests["other"])
    assert harness.outputs["right"] == follow_rules(harness.requests["right"], 7)
