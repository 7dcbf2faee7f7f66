"""Checkpoints in the formats that people publish, each written by its own description.

A scheme gives what a file holds for a linear map, and the numbers that this stands for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from fp8_checkpoints import LARGEST, is_linear
from safetensors.torch import load_file, save_file
from torch import Tensor

Stored = dict[str, Tensor]
"""Tensors by what their names have after that of the module."""

FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


@frozen
class Scheme:
    """One way to store maps.

    config: the quantization_config
    pack: of a weight [out, in], what is stored, and what that stands for in float32
    """

    config: Mapping[str, Any]
    pack: Callable[[Tensor], tuple[Stored, Tensor]]


def write_quantized(
    directory: Path, target: Path, scheme: Scheme, *, plain: tuple[str, ...] = ()
) -> None:
    """Write a checkpoint of `directory` to `target` by the scheme, and leave in `directory` the
    numbers that it stands for.

    plain: parts of names that stay as they are
    """
    tensors = load_file(directory / "model.safetensors")
    packed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not is_linear(name) or any(each in name for each in plain):
            packed[name] = tensor
            continue
        stored, tensors[name] = scheme.pack(tensor.float())
        module = name.removesuffix("weight")
        packed |= {f"{module}{end}": each.contiguous() for end, each in stored.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = dict(scheme.config)
    target.mkdir(exist_ok=True)
    (target / "config.json").write_text(json.dumps(config))
    save_file(packed, target / "model.safetensors", metadata={"format": "pt"})


def split(weight: Tensor, group: int) -> Tensor:
    """The groups of each row.   returns: [out, groups, group]"""
    return weight.unflatten(1, (-1, group if group > 0 else weight.shape[1]))


def quantize(
    weight: Tensor, bits: int, group: int, *, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers from 0 on [out, in], scales [out, groups] in float16, and zeros [out, groups]."""
    groups, most = split(weight, group), 2**bits - 1
    if symmetric:
        scales = groups.abs().amax(-1) / (2 ** (bits - 1) - 0.5)
        zeros = torch.full_like(scales, 2 ** (bits - 1))
    else:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = (high - low) / most
        zeros = (-low / scales).round()
    scales = scales.half().float()
    numbers = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, most)
    return numbers.flatten(1).int(), scales, zeros.int()


def restore(numbers: Tensor, scales: Tensor, zeros: Tensor, group: int) -> Tensor:
    """What numbers stand for."""
    groups = split(numbers.float(), group) - zeros[..., None]
    return (groups * scales[..., None]).flatten(1)


def pack_words(numbers: Tensor, bits: int) -> Tensor:
    """Words of int32 along the last dimension, the first number in the lowest bits."""
    parts = numbers.long().unflatten(-1, (-1, 32 // bits))
    words = sum(parts[..., place] << place * bits for place in range(32 // bits))
    assert isinstance(words, Tensor)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def compressed(format: str, **weights: Any) -> dict[str, Any]:
    """A configuration of compressed-tensors with one group."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
    }


def float8(strategy: str, **more: Any) -> dict[str, Any]:
    return compressed("float-quantized", type="float", num_bits=8, strategy=strategy, **more)


def pack_float8(weight: Tensor, scales: Tensor, scale_name: str) -> tuple[Stored, Tensor]:
    """FP8 by scales that fit the weight's shape."""
    values = (weight / scales).to(torch.float8_e4m3fn)
    return {"weight": values, scale_name: scales}, values.float() * scales


def by_tensor(scale_name: str) -> Callable[[Tensor], tuple[Stored, Tensor]]:
    def pack(weight: Tensor) -> tuple[Stored, Tensor]:
        stored, plain = pack_float8(weight, weight.abs().max() / LARGEST, scale_name)
        return stored | {"input_scale": torch.ones(())}, plain

    return pack


def by_row(weight: Tensor) -> tuple[Stored, Tensor]:
    return pack_float8(weight, weight.abs().amax(1, keepdim=True) / LARGEST, "weight_scale")


def by_block(weight: Tensor) -> tuple[Stored, Tensor]:
    rows, columns = weight.shape
    blocks = weight.unflatten(0, (-1, 4)).unflatten(2, (-1, 8))
    scales = blocks.abs().amax((1, 3)) / LARGEST
    wide = scales.repeat_interleave(4, 0).repeat_interleave(8, 1)
    stored, plain = pack_float8(weight, wide[:rows, :columns], "wide")
    return {"weight": stored["weight"], "weight_scale": scales}, plain


def int8_rows(symmetric: bool) -> Callable[[Tensor], tuple[Stored, Tensor]]:
    def pack(weight: Tensor) -> tuple[Stored, Tensor]:
        numbers, scales, zeros = quantize(weight, 8, -1, symmetric=symmetric)
        stored = {"weight": (numbers - 128).to(torch.int8), "weight_scale": scales}
        if not symmetric:
            stored["weight_zero_point"] = (zeros - 128).to(torch.int8)
        return stored, restore(numbers, scales, zeros, -1)

    return pack


def packed_words(
    bits: int, group: int, symmetric: bool
) -> Callable[[Tensor], tuple[Stored, Tensor]]:
    def pack(weight: Tensor) -> tuple[Stored, Tensor]:
        numbers, scales, zeros = quantize(weight, bits, group, symmetric=symmetric)
        stored = {
            "weight_packed": pack_words(numbers, bits),
            "weight_scale": scales.bfloat16(),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            rows = -len(zeros) % (32 // bits)
            padded = torch.nn.functional.pad(zeros, (0, 0, 0, rows))
            stored["weight_zero_point"] = pack_words(padded.t(), bits).t()
        return stored, restore(numbers, scales.bfloat16().float(), zeros, group)

    return pack


def gptq(
    bits: int, group: int, *, symmetric: bool, edition: int = 1, is_ordered: bool = False
) -> Scheme:
    """GPTQ: words along the inputs, and perhaps groups of columns in an order of their own."""

    def pack(weight: Tensor) -> tuple[Stored, Tensor]:
        inputs = weight.shape[1]
        size = group if group > 0 else inputs
        order = torch.arange(inputs)
        if is_ordered:
            order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
        numbers, scales, zeros = quantize(weight[:, order], bits, size, symmetric=symmetric)
        plain, stored = torch.empty_like(weight), torch.empty_like(numbers)
        plain[:, order], stored[:, order] = restore(numbers, scales, zeros, size), numbers
        groups = torch.empty(inputs, dtype=torch.int32)
        groups[order] = (torch.arange(inputs) // size).int()
        kept = (zeros.t() - int(edition == 1)) % 2**bits
        return {
            "qweight": pack_words(stored, bits).t(),
            "qzeros": pack_words(kept, bits),
            "scales": scales.t().half(),
            "g_idx": groups,
        }, plain

    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "desc_act": is_ordered,
        "sym": symmetric,
        "checkpoint_format": "gptq" if edition == 1 else "gptq_v2",
    }
    return Scheme(config, pack)


def awq(group: int, *, symmetric: bool) -> Scheme:
    """AWQ: words along the outputs, of eight columns in an order of their own."""
    columns = [0, 2, 4, 6, 1, 3, 5, 7]  # of the fours of bits of a word, from the lowest

    def words(numbers: Tensor) -> Tensor:
        return pack_words(numbers.unflatten(1, (-1, 8))[..., columns].flatten(1), 4)

    def pack(weight: Tensor) -> tuple[Stored, Tensor]:
        numbers, scales, zeros = quantize(weight, 4, group, symmetric=symmetric)
        stored = {"qweight": words(numbers.t()), "scales": scales.t().half()}
        if not symmetric:
            stored["qzeros"] = words(zeros.t())
        return stored, restore(numbers, scales, zeros, group)

    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": not symmetric,
        "version": "gemm",
        "modules_to_not_convert": None,
    }
    return Scheme(config, pack)


def fp4_bytes(weight: Tensor, scales: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Two numbers of FP4 in a byte, and what they stand for with scales [out, groups]."""
    groups = split(weight, group) / scales[..., None]
    places = (groups.abs()[..., None] - FP4).abs().argmin(-1)
    plain = (FP4[places] * groups.sign() * scales[..., None]).flatten(1)
    codes = (places + 8 * (groups < 0)).flatten(1).to(torch.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4, plain


def nvfp4(names: tuple[str, str, str], *, is_divided: bool) -> Callable[[Tensor], Any]:
    def pack(weight: Tensor) -> tuple[Stored, Tensor]:
        overall = weight.abs().max() / (6 * LARGEST)
        scales = split(weight, 16).abs().amax(-1) / 6 / overall
        stored = scales.to(torch.float8_e4m3fn)
        factor = (1 / overall).reciprocal() if is_divided else overall
        codes, plain = fp4_bytes(weight, stored.float() * factor, 16)
        kept = (1 / overall).view(1) if is_divided else overall
        return dict(zip(names, (codes, stored, kept), strict=True)), plain

    return pack


def mxfp4(weight: Tensor) -> tuple[Stored, Tensor]:
    powers = torch.exp2(split(weight, 32).abs().amax(-1).log2().floor() - 2)
    codes, plain = fp4_bytes(weight, powers, 32)
    return {"weight_packed": codes, "weight_scale": (powers.log2() + 127).to(torch.uint8)}, plain


def integers(bits: int, strategy: str, *, symmetric: bool = True, **more: Any) -> dict[str, Any]:
    return {
        "type": "int",
        "num_bits": bits,
        "strategy": strategy,
        "symmetric": symmetric,
        **more,
    }


def make_words(bits: int, group: int, *, symmetric: bool) -> Scheme:
    """Integers of compressed-tensors in words; groups of -1 are whole rows."""
    more = {"strategy": "channel"} if group < 0 else {"strategy": "group", "group_size": group}
    config = compressed("pack-quantized", type="int", num_bits=bits, symmetric=symmetric, **more)
    return Scheme(config, packed_words(bits, group, symmetric))


CT_FP4, MODELOPT_FP4 = (
    ("weight_packed", "weight_scale", "weight_global_scale"),
    ("weight", "weight_scale", "weight_scale_2"),
)

SCHEMES: Mapping[str, Scheme] = {
    "fp8 tensor": Scheme({"quant_method": "fp8"}, by_tensor("weight_scale")),
    "fbgemm fp8": Scheme({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, by_row),
    "ct fp8 tensor": Scheme(float8("tensor"), by_tensor("weight_scale")),
    "ct fp8 channel": Scheme(float8("channel"), by_row),
    "ct fp8 block": Scheme(float8("block", block_structure=[4, 8]), by_block),
    "ct int8": Scheme(compressed("int-quantized", **integers(8, "channel")), int8_rows(True)),
    "ct int8 zeros": Scheme(
        compressed("int-quantized", **integers(8, "channel", symmetric=False)), int8_rows(False)
    ),
    "ct w4a16": make_words(4, 16, symmetric=True),
    "ct w4a16 rows": make_words(4, -1, symmetric=True),
    "ct w4a16 zeros": make_words(4, 32, symmetric=False),
    "ct w8a16": make_words(8, 32, symmetric=True),
    "ct w8a16 zeros": make_words(8, 16, symmetric=False),
    "ct nvfp4": Scheme(
        compressed(
            "nvfp4-pack-quantized", type="float", num_bits=4, strategy="tensor_group", group_size=16
        ),
        nvfp4(CT_FP4, is_divided=True),
    ),
    "ct mxfp4": Scheme(
        compressed(
            "mxfp4-pack-quantized", type="float", num_bits=4, strategy="group", group_size=32
        ),
        mxfp4,
    ),
    "gptq": gptq(4, 16, symmetric=True),
    "gptq second edition": gptq(4, 32, symmetric=True, edition=2),
    "gptq zeros": gptq(4, 16, symmetric=False),
    "gptq zeros, second edition": gptq(4, -1, symmetric=False, edition=2),
    "gptq order": gptq(4, 16, symmetric=True, is_ordered=True),
    "gptq 8": gptq(8, 32, symmetric=True),
    "gptq 8 order, zeros": gptq(8, 16, symmetric=False, is_ordered=True),
    "awq": awq(16, symmetric=False),
    "awq symmetric": awq(-1, symmetric=True),
    "modelopt fp8": Scheme(
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
        by_tensor("weight_scale"),
    ),
    "modelopt nvfp4": Scheme(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
        nvfp4(MODELOPT_FP4, is_divided=False),
    ),
}
"""The published formats: method, numbers, and what shares a scale."""
