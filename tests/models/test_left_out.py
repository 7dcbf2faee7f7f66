"""Parts of a checkpoint that a family does not compute are left out, and the start says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import Case, log_probabilities

from headstock.config import EngineConfig
from headstock.engine.engine import Engine
from headstock.errors import ModelError
from headstock.ops.torch_ops import TorchOps
from headstock_conformance.model.parity import add_tensors, expected, tokens, write

PROMPT = tokens(12)
MORE = {
    "model.mtp_block.0.mlp.up_proj.weight": torch.ones(3, 5),
    "model.mtp_emb_norm.0.weight": torch.ones(7),
}


def test_layers_that_predict_further_tokens_are_left_out_and_named(tmp_path: Path) -> None:
    case = Case("ernie4_5_moe", {"num_hidden_layers": 1, "eos_token_id": 2})
    write(tmp_path, case.hf)
    theirs = expected(tmp_path, PROMPT)
    add_tensors(tmp_path, MORE)

    ours = log_probabilities(tmp_path, case.family, PROMPT, TorchOps())
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    engine = Engine(EngineConfig(model=str(tmp_path), num_pages=8, page_size=16, max_seq_len=32))
    assert [note for note in engine.summary.notes if "left out" in note] == [
        "2 tensors left out, of parts that this version does not compute: "
        "model.mtp_block.0.mlp.up_proj.weight, ..."
    ]
    engine.close()

    add_tensors(tmp_path, {"model.mtq.weight": torch.ones(1)})
    with pytest.raises(ModelError, match=r"unexpected model\.mtq\.weight"):
        log_probabilities(tmp_path, case.family, PROMPT, TorchOps())


def test_a_family_that_names_none_refuses_them(tmp_path: Path) -> None:
    case = Case("olmo2", {"num_hidden_layers": 1})
    write(tmp_path, case.hf)
    add_tensors(tmp_path, MORE)
    with pytest.raises(ModelError, match=r"unexpected model\.mtp_block\.0\."):
        log_probabilities(tmp_path, case.family, PROMPT, TorchOps())
