"""Checkpoints whose experts are in MXFP4, quantized by plain torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import FP4_VALUES, convert_moe_packed_tensors

PLAIN = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks and scales of experts as GPT-OSS publishes them.

    weight: [experts, inputs, outputs], inputs a multiple of 32
    returns: [experts, outputs, inputs / 32, 16], [experts, outputs, inputs / 32], both uint8
    """
    groups = weight.mT.unflatten(-1, (-1, 32)).float()
    exponents = (groups.abs().amax(-1) / 6).clamp(min=2.0**-100).log2().ceil()
    values = torch.tensor(FP4_VALUES)
    scaled = groups / exponents.exp2()[..., None]
    places = (scaled[..., None] - values).abs().argmin(-1)
    blocks = places[..., 0::2] | places[..., 1::2] << 4
    return blocks.to(torch.uint8), (exponents + 127).to(torch.uint8)


def quantize_experts(directory: Path, target: Path, **fields: Any) -> None:
    """Write a checkpoint with its experts in MXFP4 of `directory` to `target`, and leave in
    `directory` the numbers that transformers makes of them.
    """
    tensors = load_file(directory / "model.safetensors")
    packed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            packed[name] = tensor
            continue
        blocks, scales = quantize(tensor)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        made: Tensor = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        tensors[name] = made.contiguous()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": PLAIN,
        **fields,
    }
    target.mkdir(exist_ok=True)
    (target / "config.json").write_text(json.dumps(config))
    save_file(packed, target / "model.safetensors", metadata={"format": "pt"})
