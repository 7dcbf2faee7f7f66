"""Whole families under the operations `triton`, where fused and composed ones meet."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from attrs import evolve
from families import Case, draw, load_paged, log_probabilities
from family_cases import CASES
from often import often

from headstock.ops.torch_ops import TorchOps
from headstock_conformance.model.parity import expected, tokens, write
from headstock_triton.ops import TritonOps

PROMPT = tokens(9)
FIRST = [
    next(case for case in CASES if case.model_type == name) for name in ("lfm2", "gemma2", "phi3")
]


ONE_EACH = {case.model_type: case for case in CASES}
"""A case of every family, its last one."""


@pytest.mark.parametrize("case", often(0, [*FIRST, *ONE_EACH.values()]), ids=str)
def test_log_probabilities_are_those_of_transformers(case: Case, tmp_path: Path) -> None:
    write(tmp_path, case.hf)

    ours = log_probabilities(tmp_path, case.family, PROMPT, TritonOps(), 6)
    torch.testing.assert_close(ours, expected(tmp_path, PROMPT), atol=1e-4, rtol=0)


@pytest.mark.full
def test_a_bounded_head_samples_what_torch_samples(tmp_path: Path) -> None:
    case = evolve(FIRST[1], changes={**FIRST[1].changes, "vocab_size": 24})
    prompt = [token % 24 for token in PROMPT]
    write(tmp_path, case.hf)

    for ours, theirs in zip(
        draw(tmp_path, TritonOps(), prompt, 12), draw(tmp_path, TorchOps(), prompt, 12), strict=True
    ):
        assert torch.equal(ours.tokens, theirs.tokens)
        if ours.logprobs is not None:
            torch.testing.assert_close(ours.logprobs, theirs.logprobs, atol=1e-5, rtol=0)
    table = load_paged(tmp_path, case.family, TritonOps(), 12).ops.table
    assert table.lines() == [
        "fused: qkv_rope_store, final_norm",
        "composed: embed, attn_out, mlp, lm_head, lm_head_sample",
    ]
