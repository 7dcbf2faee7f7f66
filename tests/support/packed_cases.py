"""Packed maps of random numbers, and models of them for the operations `triton`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from ops_cases import Shape
from torch import Tensor

from headstock.spi import (
    DeviceEnv,
    Params,
    ParamSpec,
    PartQuery,
    Role,
    Weight,
    WeightFormat,
    WeightKind,
)
from headstock.weights import dequantize_
from headstock_conformance.ops.cases import config_of, params_of
from headstock_conformance.ops.packed import pack_blocks
from headstock_triton.ops import TritonOps
from headstock_triton.options import TritonOptions

HOPPER = DeviceEnv(device="cuda", capability=(9, 0))
BY_ROW = WeightFormat(kind=WeightKind.FP8_E4M3)
BLOCKS = WeightFormat(kind=WeightKind.FP8_E4M3, group=(16, 16))
LAYER = Shape(
    hidden=64, heads=2, kv_heads=1, head_dim=32, intermediate=96, vocab=48, layers=1, bias=True
)


def pack_rows(weight: Tensor, *, bias: Tensor | None = None, by_row: bool = True) -> Weight:
    """A map in FP8 with a scale for each row, or one, as loading hands it over."""
    largest = weight.float().abs().amax(1, keepdim=True) if by_row else weight.float().abs().max()
    scales = largest / 448
    return Weight(
        tensor=(weight.float() / scales).to(torch.float8_e4m3fn),
        scales=scales.reshape(-1, 1) if by_row else scales.reshape(()),
        format=WeightFormat(
            kind=WeightKind.FP8_E4M3, group=(1, weight.shape[1]) if by_row else None
        ),
        bias=bias,
    )


def draw_format(outs: int, width: int, format: WeightFormat, **more: Any) -> tuple[Weight, Tensor]:
    """A map of random numbers and scales in a format, and in float64."""
    noise = torch.Generator().manual_seed(outs)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=noise)

    rows, columns = format.group or (outs, width)
    groups = (-(-outs // rows), -(-width // columns))
    share = 2 if format.kind in (WeightKind.INT4, WeightKind.FP4_E2M1) else 1
    numbers = integers(0, 256, outs, width // share).to(torch.uint8)
    if format.kind is WeightKind.INT8:
        numbers = numbers.view(torch.int8)
    elif format.kind is WeightKind.FP8_E4M3:
        numbers = integers(-400, 400, outs, width).to(torch.float8_e4m3fn)
    scales = 2.0 ** (integers(-4, 2, *groups).float() - width.bit_length() // 2)
    if share == 1:
        scales /= 128
    zeros = integers(0, 17 if share == 2 else 100, *groups).to(torch.int8)
    weight = Weight(
        tensor=numbers,
        scales=scales if format.group else scales.reshape(()),
        zeros=zeros if format.has_zeros else None,
        format=format,
        **more,
    )
    plain = torch.empty(outs, width)
    dequantize_(weight, plain)
    return weight, plain.double()


def configure(ops: TritonOps, shape: Shape, dtype: str, env: DeviceEnv = HOPPER) -> TritonOps:
    """The set, configured for such a model on the device."""
    query = PartQuery(
        model=config_of(shape),
        dtype=dtype,
        kv_dtype=dtype,
        formats=(BY_ROW,),
        contiguous=False,
        max_rows=8,
        max_batch_tokens=128,
        max_seq_len=64,
    )
    ops.configure(query, env)
    return ops


def make_ops(
    shape: Shape,
    dtype: torch.dtype,
    options: TritonOptions,
    pack: Callable[..., Weight] = pack_rows,
    device: str = "cpu",
) -> tuple[TritonOps, Params, Params]:
    """The set for a model on Hopper, its prepared parameters, and their plain numbers.

    pack: packs a map with its bias
    """
    ops = configure(TritonOps(options), shape, str(dtype).removeprefix("torch."))
    params, plain = {}, {}
    for key, weight in params_of(config_of(shape), dtype, device).items():
        is_map = key.endswith(("qkv", "attn_out", ".gate_up", ".down"))
        is_mixed = "experts_" in key
        role = Role.LINEAR if is_map else Role.EXPERTS if is_mixed else Role.RAW
        spec = ParamSpec(shape=tuple(weight.tensor.shape), roles=frozenset({role}))
        given = weight
        if is_map:
            given = pack(weight.tensor, bias=weight.bias)
        elif is_mixed:
            stack = [pack_blocks(each, BLOCKS) for each in weight.tensor]
            scales = torch.stack([each.scales for each in stack if each.scales is not None])
            numbers = torch.stack([each.tensor for each in stack])
            given = Weight(tensor=numbers, scales=scales, format=BLOCKS)
        if given.format is not None:
            assert ops.takes_format(spec, given.format)
        params[key], wide = ops.prepare(spec, given), weight.tensor.float()
        if given.format is not None:
            dequantize_(given, wide)
        bias = None if weight.bias is None else weight.bias.float()
        plain[key] = Weight(tensor=wide, bias=bias)
    return ops, params, plain
