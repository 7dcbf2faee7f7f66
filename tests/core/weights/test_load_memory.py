"""Loading takes the memory of the weights, and of one parameter beside them."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import load_memory
import pytest
import torch
from attrs import frozen
from fp8_checkpoints import is_linear, quantize
from safetensors.torch import save_file

from headstock.errors import ModelError
from headstock.spi import Model, ParamSpec, Weight
from headstock.weights import load_weights
from headstock_deepseek.families import DEEPSEEK_V3
from headstock_qwen.families import QWEN3, QWEN3_MOE, qwen3_config


@frozen
class Big:
    """A model of 120 to 300 MB in bfloat16.

    What is freed below 32 MiB stays with a process that does not trim.
    """

    family: Model
    hf: Mapping[str, Any]
    is_fp8: bool = False


DENSE: Mapping[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 8000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}
EXPERTS = {
    **DENSE,
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 512,
    "num_hidden_layers": 5,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
}
LATENT = {
    **DENSE,
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 5,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 128,
    "moe_intermediate_size": 512,
    "n_routed_experts": 16,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 5,
}
MODELS = {
    "dense": Big(QWEN3, DENSE),
    "experts": Big(QWEN3_MOE, EXPERTS),
    # One tensor makes both matrices that are multiplied into queries and results.
    "absorbed": Big(DEEPSEEK_V3, LATENT),
    "FP8": Big(DEEPSEEK_V3, {**LATENT, "first_k_dense_replace": 1}, is_fp8=True),
}


@pytest.mark.parametrize("dummy", [False, True])
def test_a_parameter_is_gone_before_the_next_is_read(
    dummy: bool, write: Any, loading: Any, tensors: Any
) -> None:
    plain: list[weakref.ref[torch.Tensor]] = []

    def halve(spec: ParamSpec, weight: Weight) -> Weight:
        assert [each() for each in plain] == [None] * len(plain)
        plain.append(weakref.ref(weight.tensor))
        return Weight(tensor=weight.tensor.half())

    params = loading(write(tensors), prepare=halve, dummy=dummy)

    assert len(plain) == len(params)


def test_a_damaged_parameter_is_not_prepared(write: Any, loading: Any, tensors: Any) -> None:
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = torch.inf
    seen: list[int] = []

    def count(spec: ParamSpec, weight: Weight) -> Weight:
        seen.append(bool(weight.tensor.isfinite().all()))
        return weight

    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.down_proj\.weight in .* holds NaN or"):
        loading(write(tensors), prepare=count)

    assert seen == [True] * len(seen)


def test_a_transform_may_give_another_shape(write: Any, tensors: Any) -> None:
    directory = write(tensors)
    config = qwen3_config(json.loads((directory / "config.json").read_text()))
    name = "model.layers.1.mlp.down_proj.weight"
    specs = {
        f"heads.{part}": ParamSpec(
            shape=(4, 12),
            sources=((name,),),
            source_shape=(8, 12),
            transform=lambda rows, part=part: rows.view(2, 4, 12)[part].clone(),
            ignored=tuple(set(tensors) - {name}),
        )
        for part in range(2)
    }

    params = load_weights(
        directory,
        specs,
        config,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_seq_len=20,
    )

    assert torch.equal(torch.cat([weight.tensor for weight in params.values()]), tensors[name])


def write_shards(directory: Path, model: Big) -> None:
    """The model's checkpoint in bfloat16 or FP8, a file for each layer."""
    fields = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = {**model.hf, "quantization_config": fields} if model.is_fp8 else model.hf
    (directory / "config.json").write_text(json.dumps(config))
    files: dict[str, dict[str, torch.Tensor]] = {}
    for spec in model.family.params(model.family.config(model.hf)).values():
        full = spec.source_shape or spec.shape
        shape = full[1:] if spec.stacked else full
        for names in spec.sources:
            for name in names:
                rows = shape[0] // len(names) if len(names) == 1 or not spec.parts else 0
                rows = rows or spec.parts[names.index(name)]
                layer = name.split(".")[2] if ".layers." in name else "outer"
                tensors = files.setdefault(f"part-{layer}.safetensors", {})
                if name in tensors:
                    continue
                tensor = torch.empty(rows, *shape[1:], dtype=torch.bfloat16).normal_(0, 0.02)
                tensors[name] = tensor
                if model.is_fp8 and is_linear(name):
                    tensors[name], tensors[f"{name}_scale_inv"], _ = quantize(
                        tensor.float(), (128, 128)
                    )
    for file, tensors in files.items():
        save_file(tensors, directory / file)
    index = {name: file for file, tensors in files.items() for name in tensors}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", MODELS)
def test_loading_takes_the_weights_and_two_parameters(name: str, tmp_path: Path) -> None:
    write_shards(tmp_path, MODELS[name])
    for ops in ("torch_ops:TorchOps", "onednn_ops:OneDnnOps", "fbgemm_ops:FbgemmOps"):
        program = [sys.executable, load_memory.__file__, str(tmp_path), f"headstock.ops.{ops}"]
        out = subprocess.run(program, check=True, capture_output=True, text=True).stdout
        most, weights, largest = map(int, out.split())

        assert weights > 5 * largest
        assert most < weights + 2 * largest, (ops, most, weights, largest)
