"""A small declaration and safetensors files written byte by byte, right and wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from headstock_qwen.families import QWEN3

HF: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 32,
}

Tensors = dict[str, torch.Tensor]


def checkpoint_tensors() -> Tensors:
    """The tensors of `HF`, all different."""
    shapes = {
        "model.embed_tokens.weight": (16, 8),
        "lm_head.weight": (16, 8),
        "model.norm.weight": (8,),
    }
    for layer in range(2):
        inside = {
            "input_layernorm": (8,),
            "post_attention_layernorm": (8,),
            "self_attn.q_proj": (8, 8),
            "self_attn.k_proj": (4, 8),
            "self_attn.v_proj": (4, 8),
            "self_attn.o_proj": (8, 8),
            "self_attn.q_norm": (4,),
            "self_attn.k_norm": (4,),
            "mlp.gate_proj": (12, 8),
            "mlp.up_proj": (12, 8),
            "mlp.down_proj": (8, 12),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in inside.items()}
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.fixture
def tensors() -> Tensors:
    return checkpoint_tensors()


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """A function that writes a model directory with the tensors given."""

    def directory(tensors: Tensors, **changes: Any) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(HF | changes))
        save_file(tensors, tmp_path / "model.safetensors")
        return tmp_path

    return directory


@pytest.fixture
def loading() -> Callable[..., Any]:
    """A function that loads a directory in float32 on the CPU."""
    from headstock.weights import load_weights, read_config

    def run(directory: Path, **changes: Any) -> Any:
        config = QWEN3.config(read_config(directory))
        settings = {
            "dtype": torch.float32,
            "device": torch.device("cpu"),
            "max_seq_len": 20,
        } | changes
        return load_weights(directory, QWEN3.params(config), config, **settings)

    return run
