"""Checkpoints in block FP8, quantized by plain torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LARGEST = 448.0
"""The largest number of e4m3fn."""


def quantize(weight: Tensor, block: tuple[int, int], *, powers: bool = False) -> tuple[Tensor, ...]:
    """Values in FP8, scales, and what both stand for in float32.

    powers: whether scales are powers of two
    """
    rows, columns = weight.shape
    scales = torch.empty(-(-rows // block[0]), -(-columns // block[1]))
    values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    restored = torch.empty(rows, columns)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = (
                slice(i * block[0], (i + 1) * block[0]),
                slice(j * block[1], (j + 1) * block[1]),
            )
            scale = weight[part].abs().max().clamp(min=1e-12) / LARGEST
            if powers:
                scale = torch.exp2(scale.log2().ceil())
            scales[i, j] = scale
            values[part] = (weight[part] / scale).to(torch.float8_e4m3fn)
            restored[part] = values[part].float() * scale
    return values, scales, restored


def is_linear(name: str) -> bool:
    """Whether published checkpoints quantize the tensor of that name."""
    return "_proj" in name and name.endswith(".weight")


def quantize_directory(
    directory: Path,
    target: Path,
    block: tuple[int, int],
    *,
    change: Callable[[Tensor], Tensor] = lambda scales: scales,
    powers: bool = False,
    files: int = 1,
    plain: tuple[str, ...] = (),
    **fields: Any,
) -> None:
    """Write a checkpoint in block FP8 of `directory` to `target`, and leave in `directory` the
    numbers that it stands for.

    change: of scales, which loses nothing    plain: parts of names that stay as they are
    """
    tensors = load_file(directory / "model.safetensors")
    packed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        packed[name] = tensor
        if is_linear(name) and not any(each in name for each in plain):
            values, scales, tensors[name] = quantize(tensor.float(), block, powers=powers)
            packed |= {name: values, f"{name}_scale_inv": change(scales)}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": list(block),
        **fields,
    }
    target.mkdir(exist_ok=True)
    (target / "config.json").write_text(json.dumps(config))
    write_files(target, packed, files)


def write_files(directory: Path, tensors: Mapping[str, Tensor], files: int) -> None:
    """Write the tensors in turn to that many files, with an index if they are several."""
    if files == 1:
        save_file(dict(tensors), directory / "model.safetensors")
        return
    index = {name: f"part-{number % files}.safetensors" for number, name in enumerate(tensors)}
    for file in set(index.values()):
        save_file(
            {name: tensors[name] for name in tensors if index[name] == file}, directory / file
        )
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
