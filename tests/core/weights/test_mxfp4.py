"""Experts in MXFP4 stand for the numbers that transformers makes of them, dequantized or not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from families import NEW, Case, log_probabilities
from load_rank import WHOLE, load_rank
from mxfp4_checkpoints import quantize_experts
from safetensors.torch import load_file, save_file
from torch import Tensor

from headstock.errors import ModelError
from headstock.ops.torch_ops import TorchOps
from headstock.spi import ParamSpec, Role, Shard, WeightFormat, WeightKind
from headstock.weights import dequantize_
from headstock_conformance.model.parity import expected, tokens, write

# Square maps, which no shape tells from transposed ones, and others.
CASES = (
    Case("gpt_oss", {"hidden_size": 64, "intermediate_size": 64, **NEW}),
    Case("gpt_oss", {"intermediate_size": 96, "swiglu_limit": 0.5, **NEW}),
)
NAME = "model.layers.1.mlp.experts.down_proj"


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(
    "shard", [WHOLE, Shard(index=1, count=2), Shard(index=1, count=2, by_expert=True)], ids=str
)
def test_experts_stand_for_what_transformers_makes_of_them(
    case: Case, shard: Shard, tmp_path: Path
) -> None:
    write(tmp_path, case.hf)
    quantize_experts(tmp_path, tmp_path / "packed")

    plain, packed = load_rank(tmp_path, shard), load_rank(tmp_path / "packed", shard)

    assert plain.keys() == packed.keys()
    for name, weight in plain.items():
        assert torch.equal(packed[name].tensor, weight.tensor), name
        if weight.bias is not None:
            assert torch.equal(packed[name].bias, weight.bias), name  # type: ignore[arg-type]


class KeptExperts(TorchOps):
    """Experts stay packed."""

    def takes_format(self, spec: ParamSpec, format: WeightFormat) -> bool:
        return spec.roles == {Role.EXPERTS}


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(
    "shard", [WHOLE, Shard(index=1, count=2), Shard(index=1, count=2, by_expert=True)], ids=str
)
def test_experts_that_stay_packed_have_the_same_numbers(
    case: Case, shard: Shard, tmp_path: Path
) -> None:
    write(tmp_path, case.hf)
    quantize_experts(tmp_path, tmp_path / "packed")

    plain = load_rank(tmp_path, shard)
    kept = load_rank(tmp_path / "packed", shard, KeptExperts())

    for name in ("layers.1.experts_gate_up", "layers.1.experts_down"):
        weight, wanted = kept[name], plain[name].tensor
        # Half of 96 columns is one group and a half.
        is_cut = name.endswith("down") and case is CASES[1] and wanted.shape[-1] == 48
        assert weight.format == (
            None if is_cut else WeightFormat(kind=WeightKind.FP4_E2M1, group=(1, 32))
        )
        numbers = torch.empty_like(wanted)
        if is_cut:
            numbers = weight.tensor
        else:
            dequantize_(weight, numbers)
        assert torch.equal(numbers, wanted), name


def test_a_packed_model_has_the_scores_of_its_numbers(tmp_path: Path) -> None:
    write(tmp_path, CASES[1].hf)
    quantize_experts(tmp_path, tmp_path / "packed")
    prompt = tokens(20)

    ours = log_probabilities(tmp_path / "packed", CASES[1].family, prompt, TorchOps())
    torch.testing.assert_close(ours, expected(tmp_path, prompt), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("change", "fields", "message"),
    [
        (lambda found: {f"{NAME}_scales": None}, {}, f"{NAME}_scales is missing"),
        (lambda found: {f"{NAME}_blocks": None}, {}, f"{NAME}_blocks is missing"),
        (lambda found: {NAME: torch.ones(2)}, {}, f"{NAME} is there twice"),
        (
            lambda found: {f"{NAME}_scales": found[f"{NAME}_scales"][:, :3].contiguous()},
            {},
            f"{NAME}_scales: expected shape",
        ),
        (
            lambda found: {f"{NAME}_blocks": found[f"{NAME}_blocks"].float()},
            {},
            f"{NAME}_blocks: expected U8 of shape .* got F32",
        ),
        (
            lambda found: {f"{NAME}_scales": torch.full_like(found[f"{NAME}_scales"], 255)},
            {},
            f"{NAME}_scales holds scales that are NaN",
        ),
        (
            lambda found: {},
            {"modules_to_not_convert": ["model.layers.*.mlp.experts"]},
            "quantization_config says that .* is not quantized",
        ),
        (lambda found: {}, {"modules_to_not_convert": "lm_head"}, "expected a list of module"),
    ],
)
def test_what_does_not_fit_is_refused(
    change: Any, fields: Mapping[str, Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path, CASES[0].hf)
    packed = tmp_path / "packed"
    quantize_experts(tmp_path, packed, **fields)
    found = load_file(packed / "model.safetensors")
    changed: Mapping[str, Tensor | None] = {**found, **change(found)}
    kept = {name: tensor for name, tensor in changed.items() if tensor is not None}
    save_file(kept, packed / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(ModelError, match=message):
        load_rank(packed)
