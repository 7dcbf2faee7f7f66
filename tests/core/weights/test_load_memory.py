"""Loading takes the memory of the weights, and of one parameter beside them."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import load_memory
import pytest
import torch
from safetensors.torch import save_file

from headstock.errors import ModelError
from headstock.nn.decoder import decoder
from headstock.spi import ParamSpec, Weight
from headstock.weights import load_weights
from headstock_qwen.families import QWEN3, qwen3_config

HIDDEN, INNER, LAYERS, VOCAB = 1024, 4096, 8, 8000
"""About 300 MB in bfloat16: what is freed below 32 MiB stays with a process that does not trim."""


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


def write_shards(directory: Path) -> None:
    """A checkpoint in bfloat16, a file for each layer."""
    hf = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
    }
    (directory / "config.json").write_text(json.dumps(hf))
    files: dict[str, dict[str, torch.Tensor]] = {}
    for spec in decoder(qwen3_config).params(QWEN3.config(hf)).values():
        for names in spec.sources:
            for name in names:
                shape = spec.shape[1:] if spec.stacked else spec.shape
                rows = shape[0] if not spec.parts else spec.parts[names.index(name)]
                tensor = torch.empty(rows, *shape[1:], dtype=torch.bfloat16).normal_(0, 0.02)
                layer = name.split(".")[2] if ".layers." in name else "outer"
                files.setdefault(f"part-{layer}.safetensors", {})[name] = tensor
    for file, tensors in files.items():
        save_file(tensors, directory / file)
    index = {name: file for file, tensors in files.items() for name in tensors}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_takes_the_weights_and_two_parameters(tmp_path: Path) -> None:
    write_shards(tmp_path)
    for ops in ("torch_ops:TorchOps", "onednn_ops:OneDnnOps", "fbgemm_ops:FbgemmOps"):
        program = [sys.executable, load_memory.__file__, str(tmp_path), f"headstock.ops.{ops}"]
        out = subprocess.run(program, check=True, capture_output=True, text=True).stdout
        most, weights, largest = map(int, out.split())

        assert weights > 8 * largest
        assert most < weights + 2 * largest, ops
