"""Families over the one decoder by data alone: the log-probabilities of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import CASES, Case, log_probabilities
from parity import expected, tokens, write

from headstock.ops.fbgemm_ops import FbgemmOps
from headstock.ops.onednn_ops import OneDnnOps
from headstock.ops.torch_ops import TorchOps
from headstock.spi import Ops

PROMPT = tokens(40)
WAYS: tuple[tuple[type[Ops], int | None], ...] = (
    (TorchOps, None),
    (TorchOps, 7),
    (OneDnnOps, 7),
    (FbgemmOps, None),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_log_probabilities_are_those_of_transformers(case: Case, tmp_path: Path) -> None:
    write(tmp_path, case.hf)
    theirs = expected(tmp_path, PROMPT)

    for ops, chunk in WAYS:
        ours = log_probabilities(tmp_path, case.family, PROMPT, ops(), chunk)
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0, msg=lambda m: f"{ops}: {m}")  # noqa: B023
