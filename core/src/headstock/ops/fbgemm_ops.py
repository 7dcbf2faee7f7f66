"""The torch operations for CPUs, with linear maps in float16 where that loses nothing."""

from __future__ import annotations

import math
import warnings

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from headstock.errors import CannotRun
from headstock.ops.onednn_ops import OneDnnOps
from headstock.ops.packed_cpu import (
    Int4Weight,
    Int8Weight,
    can_multiply,
    multiply_int4,
    multiply_int8,
    pack_int4,
    pack_int8,
)
from headstock.spi import Batch, ParamSpec, Role, Weight, WeightFormat, WeightKind

_MULTIPLIED = frozenset((Role.LINEAR, Role.HEAD, Role.ROUTER))
_USED = _MULTIPLIED | {Role.EMBEDDING}
"""The roles of weights that these operations keep in float16: products, and their look-up."""

_MAX_RELATIVE_LOSS = 4 * 2.0**-24
"""Four roundings of float32, in which a sum of n products may be off by n of them."""

SMALL_PRODUCT = 1 << 21
"""Multiplications up to which one thread is done before several have agreed.

The kernel for several threads takes 11 us before it begins, the other 1 us (decision 0009).
"""


_PACKED_BLOCK = (64, 512)
"""Outputs and inputs of the blocks that FBGEMM packs; what a map lacks of its last ones is memory
all the same.
"""

_CHECKED_NUMBERS = 1 << 20
"""How many numbers of a weight are rounded at a time, to see whether they fit."""


@frozen(kw_only=True, eq=False)
class HalfWeight(Weight):
    """A linear map in float16, in one form or more.

    tensor: [out, in], on the meta device but for an embedding, which is looked up, too
    packed: FBGEMM's own object, with the bias    max_small_tokens: tokens whose product is small
    one_thread_weight: the same for one thread, as torch wraps it; None when no product is small
    factors: [out], by which products are multiplied before the bias is added; None for one that is
        in `packed`
    """

    packed: torch.ScriptObject
    one_thread_weight: Tensor | None
    max_small_tokens: int
    factors: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all forms, two a number each and packed ones in whole blocks, and the bias."""
        packed = 2 * math.prod(
            -(-size // block) * block
            for size, block in zip(self.tensor.shape, _PACKED_BLOCK, strict=True)
        )
        plain = 0 if self.tensor.is_meta else self.tensor.nbytes
        forms = 1 + (self.one_thread_weight is not None)
        beside = sum(each.nbytes for each in (self.bias, self.factors) if each is not None)
        return plain + forms * packed + beside


class FbgemmOps(OneDnnOps):
    """`OneDnnOps` with maps in float16 where that holds their numbers as well as float32.

    Such maps are read in half the time. Checkpoints in float16 and bfloat16 have them: float16 has
    the longer fraction, and of what it cannot hold there is next to nothing. Activations, products
    and sums are float32.

    Maps in INT8 and INT4 stay so, and their products round activations: to 8 bits, and to bfloat16.
    Numbers of FP8 are kept in float16, which has them all.
    """

    def __init__(self) -> None:
        super().__init__()
        one = torch.zeros(1, 1)
        try:
            # torch says once in a process that this will move to another package
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "fbgemm_.* is deprecated", UserWarning)
                packed = torch.fbgemm_pack_gemm_matrix_fp16(one)
                torch.fbgemm_linear_fp16_weight_fp32_activation(one, packed, None)
            torch.ops.quantized.linear_dynamic_fp16(
                one, torch.ops.quantized.linear_prepack_fp16(one, None)
            )
        except (AttributeError, RuntimeError) as error:
            raise CannotRun(
                "this torch cannot multiply float16 weights on this CPU; set ops (--ops) to "
                "onednn or torch"
            ) from error

    def takes_format(self, spec: ParamSpec, format: WeightFormat) -> bool:
        """Yes for linear maps in INT8 and FP8 by row, and in INT4 by groups of columns."""
        if not spec.roles <= _MULTIPLIED:
            return False
        if format.kind is WeightKind.FP8_E4M3:
            return format.group is None or (
                format.group[0] == 1 and format.group[1] >= spec.shape[-1]
            )
        return can_multiply(spec.shape, format)

    def prepare(self, spec: ParamSpec, weight: Weight) -> Weight:
        """Linear maps, and a tied embedding, in float16 if they fit; others as `OneDnnOps` does."""
        if weight.format is not None:
            return _prepare_packed(weight)
        plain = weight.tensor
        if not spec.roles <= _USED or not spec.roles & _MULTIPLIED or not fits_float16(plain):
            return super().prepare(spec, weight)
        # A tied embedding too: it is multiplied like a head.
        return _pack_half(plain, weight.bias, is_looked_up=Role.EMBEDDING in spec.roles)

    def linear(self, x: Tensor, weight: Weight, batch: Batch | None) -> Tensor:
        """x W^T + b, by the packed weight where it is one."""
        if not isinstance(weight, HalfWeight):
            if isinstance(weight, Int8Weight):
                return multiply_int8(x, weight)
            if isinstance(weight, Int4Weight):
                return multiply_int4(x, weight)
            return super().linear(x, weight, batch)
        if weight.factors is not None:
            out = _multiply_half(x, weight, None).mul_(weight.factors)
            return out if weight.bias is None else out.add_(weight.bias)
        return _multiply_half(x, weight, weight.bias)

    def lookup(self, tokens: Tensor, weight: Weight) -> Tensor:
        """Rows of the weight.   tokens: [tokens] int64    returns: [tokens, hidden]"""
        # An embedding may be kept in float16, and activations are float32.
        return F.embedding(tokens, weight.tensor).float()


def _multiply_half(x: Tensor, weight: HalfWeight, bias: Tensor | None) -> Tensor:
    """x W^T, with the bias; that of the kernel for several threads is in `packed`."""
    # One thread: the 24 maps of one token take 0.43 ms so, and 0.74 by the other kernel.
    if x.shape[0] <= weight.max_small_tokens:
        assert weight.one_thread_weight is not None, "small products need the weight for one thread"
        return torch.fbgemm_linear_fp16_weight_fp32_activation(x, weight.one_thread_weight, bias)
    out: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, weight.packed)
    return out


def _pack_half(
    plain: Tensor, bias: Tensor | None, *, is_looked_up: bool = False, factors: Tensor | None = None
) -> HalfWeight:
    """A map in float16.   plain: [out, in] float32"""
    max_small_tokens = SMALL_PRODUCT // plain.numel()
    return HalfWeight(
        tensor=plain.to("cpu" if is_looked_up else "meta", torch.float16),
        bias=bias,
        packed=torch.ops.quantized.linear_prepack_fp16(
            plain, None if factors is not None else bias
        ),
        one_thread_weight=torch.fbgemm_pack_gemm_matrix_fp16(plain) if max_small_tokens else None,
        max_small_tokens=max_small_tokens,
        factors=factors,
    )


def _prepare_packed(weight: Weight) -> Weight:
    """A map in one of the formats that are taken."""
    assert weight.format is not None
    assert weight.scales is not None
    if weight.format.kind is WeightKind.INT8:
        return pack_int8(weight)
    if weight.format.kind is WeightKind.INT4:
        return pack_int4(weight)
    factors = weight.scales.float().reshape(-1).expand(weight.tensor.shape[0]).contiguous()
    return _pack_half(weight.tensor.float(), weight.bias, factors=factors)


def fits_float16(weight: Tensor) -> bool:
    """Whether rounding to float16 changes no row by more than `_MAX_RELATIVE_LOSS` of its length.

    Its product with any vector then changes by no more than that share of both lengths.
    weight: [out, in] float32
    """
    # By the row's length, not number by number: below 2^-17 a bfloat16 number loses bits, as 2 to
    # 7 of 100,000 do in the demo model. Its worst row changes by a tenth of the bound.
    return all(
        bool(
            (
                rows.half().float().sub_(rows).norm(dim=1) <= _MAX_RELATIVE_LOSS * rows.norm(dim=1)
            ).all()
        )
        # A few rows at a time: the copies of a whole embedding would be the most memory of a load.
        for rows in torch.split(weight, max(1, _CHECKED_NUMBERS // max(1, weight.shape[1])))
    )
