"""Which weights stay packed, and which kernel multiplies by them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from attrs import evolve
from torch import Tensor

from headstock.spi import (
    DeviceEnv,
    ParamSpec,
    PartQuery,
    Role,
    Weight,
    WeightFormat,
    WeightKind,
)
from headstock_triton.activation import fused_silu_and_mul
from headstock_triton.fp8_linear import Fp8Map, can_group, can_take, make_map, multiply_exact_rows
from headstock_triton.fp8_parts import choose_rounded_tile, multiply_in_rounded_parts
from headstock_triton.fp8_rows import (
    Fp8Rows,
    RowForm,
    can_multiply_groups,
    can_multiply_rows,
    multiply_groups,
    multiply_rows,
    quantize_rows,
)
from headstock_triton.gated_linear import count_processors
from headstock_triton.linear import small_linear
from headstock_triton.numbers import narrow_scales, unpack
from headstock_triton.split_linear import (
    SplitTile,
    choose_packed_tile,
    choose_split_tile,
    multiply_gated,
    multiply_in_parts,
    multiply_whole,
)
from headstock_triton.split_sums import PartTile
from headstock_triton.word_experts import can_pack, pack_experts
from headstock_triton.word_linear import multiply_words
from headstock_triton.word_maps import WordMap, can_pack_map, pack_map, unpack_words
from headstock_triton.word_registers import count_norm_warps, multiply_few_words, takes_registers

LEAST_CAPABILITY = (9, 0)
"""Of devices for which Triton converts FP8 to bfloat16."""
MOST_TOKENS = 64
"""Up to this number of tokens the weight alone is packed, as reading it takes the time."""
MULTIPLE = 16
"""Of what rows, columns and groups of a packed map are a multiple: the least depth of a tile."""

_FOUR_BITS = (WeightKind.INT4, WeightKind.FP4_E2M1)
_MULTIPLIED = frozenset((Role.LINEAR, Role.HEAD, Role.ROUTER))


def can_multiply(spec: ParamSpec, format: WeightFormat) -> bool:
    """Whether there are kernels for the parameter in that format.

    Those are linear maps in groups of columns, and of FP8 in blocks.
    """
    shape = spec.shape
    if not spec.roles <= _MULTIPLIED or len(shape) != 2 or any(n % MULTIPLE for n in shape):
        return False
    if format.group is None:
        return not format.has_zeros
    rows, columns = format.group
    if format.kind is WeightKind.FP8_E4M3 and format.has_zeros:
        return False
    is_fit = columns >= shape[1] or columns % MULTIPLE == 0
    return is_fit and (rows == 1 or format.kind is WeightKind.FP8_E4M3)


def can_mix(spec: ParamSpec, format: WeightFormat, dtype: torch.dtype) -> bool:
    """Whether there are kernels for experts in that format, in models of that type.

    Those are of FP8 and INT8 by group, and in bfloat16 of 4 bits.
    """
    if spec.roles != {Role.EXPERTS} or any(n % MULTIPLE for n in spec.shape[1:]):
        return False
    if dtype is torch.bfloat16 and can_pack(spec.shape[-1], format):
        return True
    if format.kind not in (WeightKind.FP8_E4M3, WeightKind.INT8) or format.has_zeros:
        return False
    return format.group is not None and (
        format.group[1] >= spec.shape[-1] or format.group[1] % MULTIPLE == 0
    )


def can_keep(packed: str, query: PartQuery, env: DeviceEnv) -> bool:
    """Whether weights may stay packed on the device, in models of that type.

    packed: the option; with "auto", where that was measured to be faster
    """
    if env.capability is None or packed == "off":
        return False
    if packed == "auto":
        return env.capability[0] == 9 and query.dtype == "bfloat16"
    return env.capability >= LEAST_CAPABILITY and getattr(torch, query.dtype).itemsize == 2


def is_faster(spec: ParamSpec, format: WeightFormat) -> bool:
    """Whether a product in bfloat16 that kernels take is faster in the format than plain.

    Of 8B on an H200, FP8 by rows makes 1.2 to 1.5 times as many tokens, prompts included, and by
    blocks 1.18 to 1.39 times. INT4 in groups of 128 makes 1.7 to 1.9 times as many of up to 8 rows,
    and 6 % fewer of prompts. Experts: 30B-A3B makes 1.10 to 1.25 times as many in FP8 by rows, and
    GPT-OSS 2.6 times as many for one row in MXFP4. INT4 and FP8 by blocks have the same kernels,
    and were not timed; INT8 was not either.
    """
    if spec.roles == {Role.EXPERTS}:
        return format.kind in (*_FOUR_BITS, WeightKind.FP8_E4M3)
    if spec.roles != {Role.LINEAR}:
        return False
    outs, width = spec.shape
    if format.kind is WeightKind.FP8_E4M3:
        is_by_row = format.group is None or format.group[1] >= width
        return can_take(width, format) and (is_by_row or can_group(outs, width, format))
    return format.kind is not WeightKind.INT8 and can_pack_map(width, format)


def prepare_experts(weight: Weight) -> Weight:
    """The experts with scales by groups of rows and columns; those of 4 bits in words.

    weight: [experts, out, in], in a format of `can_mix`
    """
    if weight.format is not None and weight.format.kind in _FOUR_BITS:
        return pack_experts(weight)
    assert weight.scales is not None
    assert weight.format is not None
    assert weight.format.group is not None
    outs, width = weight.tensor.shape[1:]
    rows, columns = weight.format.group
    scales = narrow_scales(weight.scales.float()).contiguous()
    format = evolve(weight.format, group=(min(rows, outs), min(columns, width)))
    return evolve(weight, tensor=weight.tensor.contiguous(), scales=scales, format=format)


def prepare_packed(weight: Weight) -> Weight:
    """The weight with scales by groups of rows and columns.

    Scales of whole rows in 8 bits without zeros are [out] float32; others [groups of rows, groups
    of columns] in the narrowest type that has them all.
    """
    assert weight.scales is not None
    assert weight.format is not None
    format, numbers = weight.format, weight.tensor.contiguous()
    outs, width = len(numbers), weight.tensor.shape[1]
    if format.kind in _FOUR_BITS:
        width *= 2
    rows, columns = format.group or (1, width)
    scales, columns = weight.scales.float(), min(columns, width)
    if format.group is None:
        scales = scales.reshape(1, 1).expand(outs, 1)
    is_row = rows == 1 and columns == width and numbers.dtype.itemsize == 1 and not format.has_zeros
    if is_row and format.kind in (WeightKind.FP8_E4M3, WeightKind.INT8):
        scales = scales.reshape(outs)
    else:
        scales = narrow_scales(scales)
    return evolve(
        weight,
        tensor=numbers,
        scales=scales.contiguous(),
        zeros=None if weight.zeros is None else weight.zeros.contiguous(),
        format=evolve(format, group=(rows, columns)),
    )


def prepare_map(weight: Weight, dtype: torch.dtype, *, word_tokens: int = MOST_TOKENS) -> Weight:
    """The weight of a model in that type, in the order in which the fastest kernel reads it.

    word_tokens: those of a product up to which words are read; more take plain numbers
    """
    ready = prepare_packed(weight)
    assert ready.format is not None
    if dtype is not torch.bfloat16:
        return ready
    if can_take(ready.tensor.shape[1], ready.format):
        return make_map(ready)
    return pack_map(ready, word_tokens) or ready


def count_most_tokens(weight: Weight) -> int:
    """The tokens of a product up to which a prepared map is read as it is."""
    return weight.most_tokens if isinstance(weight, WordMap) else MOST_TOKENS


def is_by_row(weight: Weight) -> bool:
    """Whether kernels of a few tokens take the weight: plain, or 8 bits with a scale for a row."""
    if isinstance(weight, WordMap):
        return False
    return weight.scales is None or weight.scales.dim() == 1


def has_fused(x: Tensor, weight: Weight) -> bool:
    """Whether a product with the weight can have the norm before it and the sum after it inside."""
    if isinstance(weight, WordMap):
        has_room = count_norm_warps(weight) is not None
        return len(x) == 1 and has_room and takes_registers(x, weight)
    return is_by_row(weight)


def multiply_fused(
    x: Tensor,
    weight: Weight,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    total: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """A product that has its norm and its sum inside: see `small_linear`.

    x: [tokens, in], of which `has_fused` is true
    writes: total
    """
    if isinstance(weight, WordMap):
        return multiply_few_words(x, weight, norm=norm, eps=eps, gated=gated, total=total, pdl=pdl)
    return small_linear(x, weight, norm=norm, eps=eps, gated=gated, total=total, pdl=pdl)


def is_quantized(x: Tensor, weight: Weight) -> bool:
    """Whether a product takes tokens in FP8, as `is_exact` says."""
    if x.dtype is not torch.bfloat16:
        return False
    if is_exact(x):
        # One token alone is multiplied as it is.
        return isinstance(weight, Fp8Map) and len(x) > int(is_by_row(weight))
    if weight.format is None or weight.format.kind is not WeightKind.FP8_E4M3:
        return False
    if is_by_row(weight):
        return can_multiply_rows(x.device)
    return is_by_block(weight) and can_multiply_groups(x.device)


def is_exact(x: Tensor) -> bool:
    """Whether products of so many tokens round none of their numbers."""
    return len(x) <= MOST_TOKENS


def is_by_block(weight: Weight) -> bool:
    """Whether a map has the blocks of which torch has products."""
    return isinstance(weight, Fp8Map) and weight.group_scales is not None


def choose_form(x: Tensor, weight: Weight) -> RowForm:
    """The form in which a product takes tokens in FP8."""
    if is_exact(x):
        return RowForm.EXACT
    return RowForm.BY_GROUP if is_by_block(weight) else RowForm.BY_ROW


def multiply_quantized(rows: Fp8Rows, weight: Weight, *, left: bool = False) -> Tensor:
    """x W^T + b.   left: whether sums may be left in parts, [parts, tokens, out] float32"""
    if rows.form is RowForm.BY_ROW:
        tile = _choose_rounded_parts(rows, weight) if left else None
        if tile is not None:
            return multiply_in_rounded_parts(rows, weight, tile)
        return multiply_rows(rows, weight)
    assert isinstance(weight, Fp8Map), "only such products take other rows"
    if rows.form is RowForm.EXACT:
        return multiply_exact_rows(rows, weight, left=left)
    assert weight.group_scales is not None
    return multiply_groups(rows, weight, weight.group_scales)


def _choose_rounded_parts(rows: Fp8Rows, weight: Weight) -> PartTile | None:
    """The tile of a product in parts; None where whole sums are as fast."""
    (tokens, width), processors = rows.values.shape, count_processors(rows.values.device)
    return choose_rounded_tile(tokens, len(weight.tensor), width, processors=processors)


def choose_tile(tokens: int, width: int, outs: int, weight: Weight) -> SplitTile:
    """The tile of a product with a prepared weight, of which it takes `outs` rows."""
    assert weight.format is not None
    assert weight.format.group is not None
    columns = weight.format.group[1]
    return choose_packed_tile(tokens, width, outs, MULTIPLE * 8 if columns >= width else columns)


def choose_parts(tokens: int, width: int, weight: Weight, most: int) -> SplitTile | None:
    """The tile of a product whose parts are summed later; None where whole sums are as fast.

    most: tokens of such a product with a plain weight
    """
    format = weight.format
    if tokens > (most if format is None else MOST_TOKENS):
        return None
    tile = choose_split_tile(tokens, width, len(weight.tensor))
    group = None if format is None else format.group
    if tile is None or (group is not None and group[1] < width and group[1] % tile.depth):
        return None
    return tile


def multiply_left(x: Tensor, weight: Weight, most: int, *, pdl: bool) -> Tensor | None:
    """Terms whose sum is x W^T; None where whole sums are as fast.

    x: [tokens, in] of 16 bits    weight: without a bias
    most: tokens of such a product with a plain weight
    returns: [parts, tokens, out] float32, or the product
    """
    if is_quantized(x, weight):
        return multiply_quantized(quantize_rows(x, choose_form(x, weight)), weight, left=True)
    if isinstance(weight, WordMap):
        is_few = 0 < len(x) <= weight.most_tokens
        return multiply_words(x, weight, left=True, pdl=pdl) if is_few else None
    tile = choose_parts(len(x), x.shape[1], weight, most)
    return None if tile is None else multiply_in_parts(x, weight, tile, pdl=pdl)


def multiply_packed(x: Tensor, weight: Weight, *, pdl: bool = False) -> Tensor:
    """x W^T + b.   x: [tokens, in] of 16 bits    weight: one of `prepare_map`"""
    (tokens, width), words = x.shape, weight if isinstance(weight, WordMap) else None
    if is_quantized(x, weight):
        return multiply_quantized(quantize_rows(x, choose_form(x, weight)), weight)
    if tokens > count_most_tokens(weight):
        plain = unpack(weight, x.dtype) if words is None else unpack_words(words, x.dtype)
        return F.linear(x, plain, weight.bias)
    outs = len(weight.tensor) if words is None else words.outs
    if not tokens:
        return x.new_empty(0, outs)
    if words is not None:
        return multiply_words(x, words, pdl=pdl)
    if tokens == 1 and is_by_row(weight):
        return small_linear(x, weight, pdl=pdl)
    return multiply_whole(x, weight, choose_tile(tokens, width, outs, weight), pdl=pdl)


def multiply_packed_gated(x: Tensor, weight: Weight, *, pdl: bool = False) -> Tensor:
    """silu(x G^T + g) * (x U^T + u), for up to `count_most_tokens` tokens.

    weight: one of `prepare_map`, whose halves are gate and up
    """
    if isinstance(weight, WordMap):
        return multiply_words(x, weight, gated=True, pdl=pdl)
    if is_quantized(x, weight):
        return fused_silu_and_mul(multiply_packed(x, weight), pdl=pdl)
    (tokens, width), outs = x.shape, len(weight.tensor) // 2
    if tokens == 1 and is_by_row(weight):
        return small_linear(x, weight, gated=True, pdl=pdl)
    return multiply_gated(x, weight, choose_tile(tokens, width, outs, weight), pdl=pdl)
