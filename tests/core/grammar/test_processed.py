"""Answers of a grammar beside a processor of logits that would leave it."""

from __future__ import annotations

import pytest
from toy_engine import EngineHarness, Toys, request
from toy_grammar import END, is_allowed
from toy_processor import Shift

from headstock import SamplingParams
from headstock.scheduler import Request
from headstock.structured_outputs import StructuredOutputsParams


class UncheckedHarness(EngineHarness):
    """A harness that takes any output."""

    def check_output(self, one: Request) -> None:
        """Nothing is wrong."""


@pytest.mark.parametrize("runner", ["eager", "rerun"])
def test_scores_that_move_to_forbidden_tokens_are_no_way_round_a_grammar(
    toys: Toys, monkeypatch: pytest.MonkeyPatch, runner: str
) -> None:
    monkeypatch.setattr("headstock.grammar.trial.TrialProcess.check", lambda *_: None)
    monkeypatch.setattr(Shift, "apply", lambda self, logits, *_: -logits.nan_to_num(neginf=9.0))
    engine = toys.engine(logits_processors=("shift",), grammar="toy-rules", runner=runner)
    grammar = StructuredOutputsParams(grammar="9")
    params = SamplingParams(temperature=0.0, structured_outputs=grammar)
    one = request("a", [5, 2, 3], 9, params=params, stop_ids=(END,))
    harness = UncheckedHarness(engine).run([one])
    engine.close()

    answer = harness.outputs["a"]
    assert len(answer) > 3 or harness.reasons["a"] == "error"
    assert all(is_allowed(answer[:at], token) for at, token in enumerate(answer))
