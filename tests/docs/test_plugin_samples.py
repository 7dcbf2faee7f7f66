"""The set of operations and the family that the guide to plugins writes down."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ops_cases
import torch
from attrs import evolve
from safetensors.torch import save_file
from source_tree import ROOT

from headstock.nn.decoder import forward
from headstock.ops.bound import BoundOps
from headstock.ops.torch_ops import TorchOps
from headstock.spi import Head, ModelConfig, Ops
from headstock.startup.kv_groups import find_group_fault
from headstock.weights import load_weights
from headstock_conformance.model.paged import Paged

GUIDE = (ROOT / "docs" / "plugins.md").read_text()


def sample(name: str) -> Any:
    """What the sample of that name defines."""
    (source,) = re.findall(rf"^```python name={name}\n(.*?)^```$", GUIDE, re.M | re.S)
    names: dict[str, Any] = {"__name__": f"sample_{name}"}
    exec(compile(source, f"docs/plugins.md, {name}", "exec"), names)
    return SimpleNamespace(**names)


def test_the_sample_operations_do_what_torchs_do() -> None:
    shape = ops_cases.Shape(
        hidden=16, heads=2, kv_heads=1, head_dim=8, intermediate=24, vocab=32, layers=2
    )
    mine = sample("ops").MyOps()
    plain = ops_cases.config_of(shape)

    def hidden_of(ops: Ops, config: ModelConfig) -> torch.Tensor:
        params = ops_cases.params_of(config, torch.float32, "cpu")
        batch = ops_cases.batch_of(config, 5, torch.float32, "cpu")
        bound = BoundOps("mine", ops, config)
        bound.bind(params, config)
        return forward(params, config, batch, lambda q, layer: q, bound)

    for config, fused in ((plain, True), (evolve(plain, residual_scale=0.5), True)):
        assert ("fused: mlp" in BoundOps("mine", mine, config).table.lines()) is fused
        torch.testing.assert_close(hidden_of(mine, config), hidden_of(TorchOps(), config))
    normed = evolve(plain, post_norm=True)
    assert BoundOps("mine", mine, normed).table.lines() == ["all composed"]


def test_the_sample_family_loads_and_runs(tmp_path: Path) -> None:
    family = sample("family").MINE
    hf = {
        "model_type": "mine", "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "hidden_act": "silu",
        "intermediate_size": 24, "rms_norm_eps": 1e-6, "max_position_embeddings": 64,
        "tie_word_embeddings": False, "sliding_window": 5, "residual_multiplier": 0.5,
        "logits_scaling": 4.0,
    }  # fmt: skip
    config = family.config(hf)
    assert (config.head, config.residual_scale) == (Head(scale=0.25), 0.5)
    assert (config.ignored_fields, find_group_fault(config)) == ((), "")
    specs = family.params(config)
    tensors = {
        name: torch.randn(spec.shape)
        for spec in specs.values()
        for row in spec.sources
        for name in row
        if len(row) == 1
    }
    merged = {f"model.layers.{i}.mlp.{part}_proj.weight" for i in (0, 1) for part in ("gate", "up")}
    tensors |= {name: torch.randn(24, 16) for name in merged}
    save_file(tensors | {"model.mtp.x.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    params = load_weights(
        tmp_path,
        specs,
        config,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_seq_len=32,
    )
    whole = Paged.new(family, config, params, TorchOps(), length=32)
    steps = Paged.new(family, config, params, TorchOps(), length=32)
    scores = whole.step({0: list(range(9))})
    assert scores.shape == (9, 32) and bool(scores.isfinite().all())
    torch.testing.assert_close(
        torch.cat([steps.step({0: [token]}) for token in range(9)]), scores, atol=1e-4, rtol=0
    )
