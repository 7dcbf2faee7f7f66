"""The product of gate and up for many tokens, with the activation in its epilogue (Hopper).

Otherwise the product is written, read by the activation and written again at half the width.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from headstock_triton.device_function import device_function
from headstock_triton.portable import INTERPRETED, add_product, round_to

LEAST_TOKENS = 1024
"""Minimum number of tokens to fuse following operations into large products, which fill the
device."""
LEAST_FULL_TOKENS = 256
"""The same minimum for gate and up if their tiles fill the device until the end."""
FULL = 0.9
"""Minimum utilization: the share of processor time with work until the last processor is done.

On an H100 256 and 512 tokens take 0.90 to 0.94 of the time of torch's product and a kernel above
it, and 0.96 to 1.37 below.
"""


@frozen(kw_only=True)
class GatedTile:
    """Tokens, rows of gate (and of up) and depth of a tile, and token tiles per group."""

    tokens: int = 128
    rows: int = 128
    depth: int = 64
    warps: int = 8
    stages: int = 3
    group: int = 8


@device_function
def _multiply_tile(
    tile,
    blocks,
    x,
    weight,
    out,
    INTERS: tl.constexpr,
    WIDTH: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """A tile of silu(gate) * up, each rounded as the torch operations round it.

    Rows of gate and up alternate in a tile of the weight, so that one product computes both, and
    both halves of a value end up in the same thread.
    """
    columns: tl.constexpr = (INTERS + BN - 1) // BN
    dtype: tl.constexpr = out.dtype
    # Neighbours share weights and tokens in the second-level cache.
    first = tile // (GROUP * columns) * GROUP
    size = tl.minimum(blocks - first, GROUP)
    inside = tile % (GROUP * columns)
    block = first + inside % size
    column = inside // size
    sums = tl.zeros((BM, 2 * BN), tl.float32)
    for start in range(0, WIDTH, BK):
        a = x.load([block * BM, start])
        w = weight.load([column * BN, 0, start]).reshape(2 * BN, BK)
        sums = add_product(a, w.T, sums)
    gate, up = tl.split(sums.reshape(BM, BN, 2))
    gate = round_to(gate, dtype).to(tl.float32)
    silu = round_to(gate / (1.0 + tl.exp(-gate)), dtype).to(tl.float32)
    result = round_to(silu * round_to(up, dtype).to(tl.float32), dtype)
    out.store([block * BM, column * BN], result)


@triton.jit(do_not_specialize=("tokens",))
def gated_kernel(
    x,
    weight,
    out,
    tokens,
    INTERS: tl.constexpr,
    WIDTH: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """All tiles, several per program, which loads the next tile while it finishes one."""
    blocks = tl.cdiv(tokens, BM)
    tiles = blocks * ((INTERS + BN - 1) // BN)
    if INTERPRETED:  # which does not support computed loop bounds: one program per tile
        _multiply_tile(tl.program_id(0), blocks, x, weight, out, INTERS, WIDTH, BM, BN, BK, GROUP)
    else:
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
            _multiply_tile(tile, blocks, x, weight, out, INTERS, WIDTH, BM, BN, BK, GROUP)


def choose_large_tile(tokens: int, width: int, inters: int, *, processors: int) -> GatedTile | None:
    """The tile for this number of tokens; None if torch's product and a kernel are as fast.

    Measured at power-limited clocks, as with prompts of thousands of tokens.
    """
    tile = GatedTile(group=8 if width <= 1024 else 16)
    # Rows are aligned to 16 bytes, as the tensor memory accelerator requires.
    if tokens < LEAST_FULL_TOKENS or inters % tile.rows or width % tile.depth:
        return None
    tiles = triton.cdiv(tokens, tile.tokens) * (inters // tile.rows)
    rounds = triton.cdiv(tiles, processors)
    filled = tokens * inters / (tile.tokens * tile.rows)
    return tile if tokens >= LEAST_TOKENS or filled >= FULL * rounds * processors else None


def multiply_gated_tiles(x: Tensor, weight: Tensor, tile: GatedTile) -> Tensor:
    """silu(x G^T) * (x U^T), where gate and up are the weight's halves.

    x: [tokens, in] of 16 bits    weight: [2 * out, in]    returns: [tokens, out]
    """
    (tokens, width), inters = x.shape, len(weight) // 2
    out = x.new_empty(tokens, inters)
    # A view in which rows of gate and up alternate, without copying.
    pairs = TensorDescriptor(
        weight, [inters, 2, width], [width, inters * width, 1], [tile.rows, 2, tile.depth]
    )
    tiles = triton.cdiv(tokens, tile.tokens) * triton.cdiv(inters, tile.rows)
    programs = tiles if INTERPRETED else min(tiles, count_processors(x.device))
    gated_kernel[(programs,)](
        TensorDescriptor.from_tensor(x.contiguous(), [tile.tokens, tile.depth]),
        pairs,
        TensorDescriptor.from_tensor(out, [tile.tokens, tile.rows]),
        tokens,
        INTERS=inters,
        WIDTH=width,
        BM=tile.tokens,
        BN=tile.rows,
        BK=tile.depth,
        GROUP=tile.group,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


@cache
def count_processors(device: torch.device) -> int:
    """The device's multiprocessors; 1 without a device, where kernels are only compiled."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
