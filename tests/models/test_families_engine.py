"""Families through the whole engine: the tokens and log-probabilities of transformers.

Elsewhere the layers of most families attend by the kit's own attention; here core tells a backend
what each layer asks for.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_parity import MAX_TOKENS, answer_alone, assert_equal, generate
from families import Case
from family_cases import CASES
from often import often

from headstock_conformance.model.parity import write

FIRST = {case.model_type: case for case in reversed(CASES)}
"""The first case of each family."""
ORDER = sorted(FIRST, key=lambda name: name not in ("gemma2", "gemma3_text", "granite"))
"""Those with caps, with windows and two ropes, and with a scale of their own come first."""


@pytest.mark.parametrize("case", often(3, [FIRST[name] for name in ORDER]), ids=str)
def test_tokens_are_those_of_transformers(case: Case, tmp_path: Path) -> None:
    write(tmp_path, case.hf)

    outputs, _ = generate(tmp_path, max_batch_tokens=11, max_running_requests=7)
    for number, (output, answer) in enumerate(zip(outputs, answer_alone(tmp_path), strict=True)):
        assert len(output.token_ids) == MAX_TOKENS
        assert_equal(output, answer, number)
