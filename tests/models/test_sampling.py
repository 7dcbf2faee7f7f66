"""What a family's head does to scores holds where tokens are sampled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import DRAWS, Case, chi_square, draws_are_true
from family_cases import CASES
from packed_ops import PackedOps

from headstock import LLM, SamplingParams
from headstock.ops.fbgemm_ops import FbgemmOps
from headstock.ops.torch_ops import TorchOps
from headstock.spi import Ops
from headstock_conformance.model.parity import expected, tokens, write

VOCAB = 24
GEMMA2 = Case("gemma2", {**CASES[0].changes, "vocab_size": VOCAB})
PROMPT = [token % VOCAB for token in tokens(12)]


@pytest.mark.parametrize("ops", [TorchOps, PackedOps, FbgemmOps])
def test_a_bounded_head_samples_its_true_distribution(ops: type[Ops], tmp_path: Path) -> None:
    write(tmp_path, GEMMA2.hf)

    draws_are_true(tmp_path, ops(), PROMPT, expected(tmp_path, PROMPT)[-1].exp())


@pytest.mark.full
def test_an_engine_samples_the_true_distribution_of_gemma2(tmp_path: Path) -> None:
    write(tmp_path, GEMMA2.hf)
    probabilities = expected(tmp_path, PROMPT)[-1].exp()
    rounds, each = DRAWS // 125, 125
    params = [
        SamplingParams(temperature=1.0, max_tokens=1, seed=1000 * i, ignore_eos=True, n=each)
        for i in range(rounds)
    ]

    with LLM(str(tmp_path), attn="sdpa", max_running_requests=256) as llm:
        outputs = llm.generate([{"prompt_token_ids": PROMPT}] * rounds, params)

    drawn = torch.tensor([each.token_ids[0] for output in outputs for each in output.outputs])
    assert len(drawn) == DRAWS
    assert chi_square(drawn.bincount(minlength=VOCAB).double(), probabilities) < 2.5 * VOCAB
