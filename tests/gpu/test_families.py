"""Families on the device under `triton`: the tokens and log-probabilities of transformers.

In float32, where kernels may differ by the order of sums alone. `HEADSTOCK_FAMILIES_DEVICE=cpu`
tries the test without a GPU, under `torch`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import transformers
from engine_parity import MAX_TOKENS, answer_alone, assert_equal, generate
from families import Case
from family_cases import CASES
from packaging.version import Version

from headstock_conformance.model.parity import write

DEVICE = os.environ.get("HEADSTOCK_FAMILIES_DEVICE", "cuda")
pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs an NVIDIA GPU"
)
OPS = "triton" if DEVICE == "cuda" else "torch"

SINCE = {"gpt_oss": (5, 23), "minimax_m2": (5, 23)}
"""Versions of transformers from which it is a reference: earlier ones leave settings unread."""

FIRST = {case.model_type: case for case in reversed(CASES)}
"""The first case of each family."""


@pytest.mark.parametrize("case", FIRST.values(), ids=str)
def test_tokens_are_those_of_transformers(case: Case, tmp_path: Path) -> None:
    if Version(transformers.__version__).release < SINCE.get(case.model_type, ()):
        pytest.skip(f"transformers {transformers.__version__} is no reference for this family")
    write(tmp_path, case.hf)

    settings = {"device": DEVICE, "dtype": "float32", "ops": OPS, "max_batch_tokens": 11}
    outputs, _ = generate(tmp_path, max_running_requests=7, **settings)
    for number, (output, answer) in enumerate(zip(outputs, answer_alone(tmp_path), strict=True)):
        assert len(output.token_ids) == MAX_TOKENS
        assert_equal(output, answer, number)
