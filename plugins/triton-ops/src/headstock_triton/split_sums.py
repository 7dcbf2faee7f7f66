"""Sums of which several programs have a part each, added in the order of the parts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor

from headstock_triton.device_function import device_function
from headstock_triton.portable import round_to


@frozen(kw_only=True)
class PartTile:
    """Rows of the weight and tokens of a tile, and the number of programs that share its columns.

    The weight is the left factor, whose tile has 64 rows on Hopper.
    """

    rows: int
    tokens: int
    parts: int
    warps: int
    stages: int


def choose_many_tile(outs: int) -> PartTile:
    """The tile of a product of more than 64 tokens, each with whole sums."""
    # By arithmetic: a unit's numbers are made once for 128 tokens, whose products take longer.
    rows, stages = (128, 2) if outs >= 16_384 else (64, 3)  # 150 and 219 KB of shared memory
    return PartTile(rows=rows, tokens=128, parts=1, warps=8, stages=stages)


def choose_part_tile(
    tokens: int, outs: int, steps: int, most: int, *, least_tokens: int = 8, stages: int = 4
) -> PartTile:
    """The tile of a product of up to 64 tokens.

    steps: of a program without parts, which these divide
    most: programs of up to 32 tokens    least_tokens: of a tile    stages: up to 32 tokens
    """
    # Measured on the 132 processors of an H200.
    rows, warps, most_parts = 64, 4, 8
    if tokens > 32:
        rows, warps, stages, most_parts, most = 128, 8, 3, 4, 200
    tiles = triton.cdiv(outs, rows)
    fit = (n for n in range(most_parts, 1, -1) if steps % n == 0 and tiles * n <= most)
    return PartTile(
        rows=rows,
        tokens=max(least_tokens, triton.next_power_of_2(tokens)),
        parts=next(fit, 1),
        warps=warps,
        stages=stages,
    )


def make_sums(
    x: Tensor,
    outs: int,
    rows: int,
    tile: PartTile,
    *,
    left: bool,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor]:
    """The result of a product, [tokens, outs], and what its parts are written to.

    left: whether the parts, [parts, tokens, rows] float32, are the result where there are several
    """
    tokens = x.shape[-2]
    if tile.parts == 1:
        out = x.new_empty(tokens, outs, dtype=dtype)
        return out, out
    parts = x.new_empty(tile.parts, tokens, rows, dtype=torch.float32)
    return parts if left else x.new_empty(tokens, outs, dtype=dtype), parts


@device_function
def _store_whole(
    sums, bias, out, near, row, exists, token, tokens, outs, BIAS: tl.constexpr, GATED: tl.constexpr
):
    dtype: tl.constexpr = out.dtype.element_ty
    if BIAS:
        sums += tl.load(bias + near).to(tl.float32)[:, None]
    if GATED:
        pairs = tl.reshape(tl.trans(sums), (sums.shape[1], sums.shape[0] // 2, 2))
        gate, up = tl.split(pairs)
        gate = round_to(gate, dtype).to(tl.float32)
        silu = round_to(gate / (1.0 + tl.exp(-gate)), dtype).to(tl.float32)
        result = round_to(silu * round_to(up, dtype).to(tl.float32), dtype)
        inner = tl.program_id(0) * (sums.shape[0] // 2) + tl.arange(0, sums.shape[0] // 2)
        place = token[:, None] * (outs // 2) + inner[None, :]
        mask = (token < tokens)[:, None] & (inner < outs // 2)[None, :]
        tl.store(out + place, result, mask)
    else:
        mask = exists[:, None] & (token < tokens)[None, :]
        tl.store(out + token[None, :] * outs + row[:, None], round_to(sums, dtype), mask)


@device_function
def find_rows(outs, ROWS: tl.constexpr, GATED: tl.constexpr):
    """The rows of a program's tile, and whether they exist.

    GATED: rows of gate and up alternate, so that both halves of a column end up in one thread
    """
    r = tl.arange(0, ROWS)
    row = tl.program_id(0) * ROWS + r
    exists = row < outs
    if GATED:
        inner = tl.program_id(0) * (ROWS // 2) + r // 2
        row = inner + r % 2 * (outs // 2)
        exists = inner < outs // 2
    return row, exists


@device_function
def store_sums(
    sums,
    bias,
    parts,
    out,
    counters,
    row,
    exists,
    tokens,
    outs,
    PARTS: tl.constexpr,
    LEFT: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    first=0,
):
    """Write the sums of a program to `out`; of several PARTS, by the last program that has one.

    sums: [rows, tokens]    parts: [PARTS, tokens, outs] float32    counters: [tiles], 0
    GATED: rows of gate and up give silu(gate) * up, rounded as the torch operations round it
    LEFT: the parts are left to a later kernel
    first: the token of the first column; other than 0 where PARTS is 1
    """
    token = first + tl.arange(0, sums.shape[1])
    near = tl.minimum(row, outs - 1)
    if PARTS == 1:
        _store_whole(sums, bias, out, near, row, exists, token, tokens, outs, BIAS, GATED)
    else:
        place = parts + token[None, :] * outs + row[:, None]
        there = exists[:, None] & (token < tokens)[None, :]
        tl.store(place + tl.program_id(1) * tokens * outs, sums, there)
        if not LEFT:
            counter = counters + tl.program_id(0)
            tl.debug_barrier()
            if tl.atomic_add(counter, 1, sem="acq_rel") == PARTS - 1:
                whole = tl.zeros(sums.shape, tl.float32)
                for part in tl.static_range(PARTS):
                    # Past the first-level cache, which may have older numbers.
                    source = place + part * tokens * outs
                    whole += tl.load(source, there, 0.0, cache_modifier=".cg")
                _store_whole(whole, bias, out, near, row, exists, token, tokens, outs, BIAS, GATED)
                tl.store(counter, 0)
