"""A try: norm, rope and store of a decode row's heads inside attention, one kernel less a layer.

    PYTHONPATH=tests:tests/support python -m gpu.decode_heads [--out FILE]
    TRITON_INTERPRET=1 PYTHONPATH=tests:tests/support python -m gpu.decode_heads --device cpu

It compares bits of outputs and pools with those of the two kernels that plugins have, then times
layers inside a graph, six kernels a layer and five, by shape, rows and context. "Later" lets the
next kernel begin only when a part's keys have been read: its weights would be asked for first, and
8B's take longer than the keys. The kernel repeats what `decode_kernel` does after its queries: it
is to take its place, or to go, by what a GPU says.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor

from headstock.spi import LayerInfo
from headstock_fa.decode_kernel import (
    LOG2_E,
    MERGED_NUMBERS,
    PartialSums,
    _add_block,
    _load_block,
    attend_decode_rows,
)
from headstock_fa.decode_merge import merge_parts
from headstock_fa.decode_tile import DecodeTile, choose_tile
from headstock_fa.pdl import INTERPRETED, begin_next, wait_for_previous
from headstock_triton.heads import rope_and_store_kv
from headstock_triton.linear import small_linear
from headstock_triton.portable import round_to

EPS = 1e-6
PAGE = 64
CONTEXTS = (128, 640, 4096)
REPLAYS = 60


@frozen(kw_only=True)
class Shape:
    """What of a model the chain of a decode step depends on."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int


SHAPE = Shape(layers=28, hidden=1024, heads=16, kv_heads=8, head_dim=128, intermediate=3072)
LARGE = Shape(layers=12, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=12288)
"""A third of 8B's layers, whose weights no cache holds."""
CASES = (*((SHAPE, rows) for rows in (1, 2, 4, 8)), (LARGE, 1))
"""Products of several tokens take in no norm as wide as 8B's."""
WAYS = {"six kernels": (False, False), "five": (True, False), "five, later": (True, True)}
"""Whether heads are fused, and whether the next kernel begins later."""
TINY = Shape(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=96)


@triton.jit
def _turn(
    x,
    partner,
    gain,
    partner_gain,
    cos,
    sin,
    is_first,
    dim,
    eps,
    NORM: tl.constexpr,
    dtype: tl.constexpr,
):
    """Heads after norm and rope, rounded as `heads_kernel` rounds.

    x: [heads, dim]    partner: the number that each one turns with
    """
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / dim + eps)[:, None]
        x = round_to(round_to(x * scale, dtype).to(tl.float32) * gain, dtype).to(tl.float32)
        partner = round_to(
            round_to(partner * scale, dtype).to(tl.float32) * partner_gain, dtype
        ).to(tl.float32)
    side = partner * sin
    turned = round_to(x * cos, dtype).to(tl.float32) + tl.where(is_first, -side, side)
    return round_to(turned, dtype)


@triton.jit(
    do_not_specialize=("columns", "least_blocks"),
    do_not_specialize_on_alignment=("lens", "table"),
)
def decode_heads_kernel(
    qkv, norm, rope, keys, values, lens, table, out, part_sums, part_levels, counters, scale, eps,
    columns, least_blocks, page_stride, slot_stride, head_stride, qkv_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    PAGE: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, MERGED: tl.constexpr,
    MERGED_GROUP: tl.constexpr, NORM: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
    LATER: tl.constexpr,
):  # fmt: skip
    """One KV head of one row and a part of its keys, from the projection on."""
    if not LATER:
        begin_next(PDL)
    split, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads: tl.constexpr = HEADS // KV_HEADS
    half: tl.constexpr = DIM // 2
    dtype: tl.constexpr = qkv.dtype.element_ty
    past = tl.load(lens + row) - 1
    blocks = tl.cdiv(past, BLOCK)
    share = tl.maximum(tl.cdiv(blocks, SPLITS), least_blocks)
    used = tl.maximum(tl.cdiv(blocks, share), 1)
    group, d = tl.arange(0, GROUP), tl.arange(0, DIM)
    is_first = (d < half)[None, :]
    turned_with = tl.where(d < half, d + half, d - half)
    if split < used:
        start = split * share * BLOCK
        stop = tl.minimum(past, start + share * BLOCK)
        pages = table + row * columns
        inside = kv_head * head_stride + d[None, :]
        in_head = d < DIM
        k, v, seen = _load_block(
            keys, values, pages, start, stop, inside, in_head, page_stride, slot_stride, PAGE, BLOCK
        )
        own_page = tl.load(pages + past // PAGE).to(tl.int64)
        angle = rope + past.to(tl.int64) * DIM + (d % half)
        cos = round_to(tl.load(angle), dtype).to(tl.float32)[None, :]
        sin = round_to(tl.load(angle + half), dtype).to(tl.float32)[None, :]
        head = kv_head * heads + group
        is_head = (group < heads)[:, None]
        own_head = HEADS + kv_head
        if NORM:
            gains = norm + head[:, None] * DIM
            gain = tl.load(gains + d[None, :], is_head, other=0.0).to(tl.float32)
            other_gain = tl.load(gains + turned_with[None, :], is_head, other=0.0).to(tl.float32)
            key_gain = tl.load(norm + own_head * DIM + d)[None, :].to(tl.float32)
            other_key_gain = tl.load(norm + own_head * DIM + turned_with)[None, :].to(tl.float32)
        else:
            gain = tl.zeros((GROUP, DIM), tl.float32)
            key_gain = tl.zeros((1, DIM), tl.float32)
            other_gain, other_key_gain = gain, key_gain
        wait_for_previous(PDL)
        source = qkv + row * qkv_stride
        queries = source + head[:, None] * DIM
        x = tl.load(queries + d[None, :], is_head, other=0.0).to(tl.float32)
        other = tl.load(queries + turned_with[None, :], is_head, other=0.0).to(tl.float32)
        x = _turn(x, other, gain, other_gain, cos, sin, is_first, DIM, eps, NORM, dtype)
        mine = split == 0
        key = source + own_head * DIM
        own = tl.load(key + d, mine, other=0.0).to(tl.float32)[None, :]
        other = tl.load(key + turned_with, mine, other=0.0).to(tl.float32)[None, :]
        own_key = _turn(
            own, other, key_gain, other_key_gain, cos, sin, is_first, DIM, eps, NORM, dtype
        )
        own_value = tl.load(key + KV_HEADS * DIM + d, mine, other=0.0)[None, :]
        cell = own_page * page_stride + (past % PAGE) * slot_stride + inside
        stored = mine & (d[None, :] < DIM)
        tl.store(keys + cell, own_key, stored)
        tl.store(values + cell, own_value, stored)
        own_score = tl.sum(x.to(tl.float32) * own_key.to(tl.float32), 1) * scale
        peak = tl.where(mine, own_score * LOG2_E, -float("inf"))
        mass = tl.where(mine, 1.0, 0.0) + tl.zeros((GROUP,), tl.float32)
        sums = own_value.to(tl.float32) + tl.zeros((GROUP, DIM), tl.float32)
        peak, mass, sums = _add_block(x, k, v, seen, peak, mass, sums, scale, 0.0)
        if INTERPRETED:
            place = start + BLOCK
            while place < stop:
                k, v, seen = _load_block(
                    keys, values, pages, place, stop, inside, in_head, page_stride, slot_stride,
                    PAGE, BLOCK,
                )  # fmt: skip
                peak, mass, sums = _add_block(x, k, v, seen, peak, mass, sums, scale, 0.0)
                place += BLOCK
        else:
            for later in tl.range(start + BLOCK, stop, BLOCK, num_stages=STAGES):
                k, v, seen = _load_block(
                    keys, values, pages, later, stop, inside, in_head, page_stride, slot_stride,
                    PAGE, BLOCK,
                )  # fmt: skip
                peak, mass, sums = _add_block(x, k, v, seen, peak, mass, sums, scale, 0.0)
        if LATER:
            begin_next(PDL)
        answer = out + row * HEADS * DIM + kv_head * heads * DIM
        if used == 1:
            at = group[:, None] * DIM + d[None, :]
            tl.store(answer + at, (sums / mass[:, None]).to(out.dtype.element_ty), is_head)
        else:
            pair = row * KV_HEADS + kv_head
            place = (pair * SPLITS + split) * heads + group
            levels = tl.num_programs(2) * KV_HEADS * SPLITS * heads
            tl.store(part_levels + place, peak, group < heads)
            tl.store(part_levels + levels + place, mass, group < heads)
            tl.store(part_sums + place[:, None] * DIM + d[None, :], sums, is_head)
            tl.debug_barrier()
            ended = tl.atomic_add(counters + pair, 1, sem="acq_rel", scope="gpu")
            if ended == used - 1:
                tl.store(counters + pair, 0)
                merge_parts(
                    part_sums, part_levels, part_levels + levels, pair * SPLITS, used, answer,
                    out, heads, DIM, DIM, SPLITS, MERGED, MERGED_GROUP, False,
                )  # fmt: skip


def attend_with_heads(
    qkv: Tensor,
    norm: Tensor,
    rope: Tensor,
    pool: Tensor,
    lens: Tensor,
    table: Tensor,
    layer: LayerInfo,
    out: Tensor,
    parts: PartialSums,
    *,
    tile: DecodeTile,
    pdl: bool,
    later: bool,
) -> None:
    """`rope_and_store_kv`, then `attend_decode_rows`.   writes: out, pool, parts"""
    (rows, heads, head_dim), kv_heads = out.shape, pool.shape[3]
    keys, values = pool[:, 0], pool[:, 1]
    merged_group = triton.next_power_of_2(heads // kv_heads)
    pdl = pdl and not INTERPRETED
    options: dict[str, Any] = {"launch_pdl": True} if pdl else {}
    decode_heads_kernel[(tile.splits, kv_heads, rows)](
        qkv, norm, rope, keys, values, lens, table, out, parts.sums, parts.levels, parts.counters,
        layer.scale, EPS, table.stride(0), -(-tile.least_tokens // tile.tokens),
        *keys.stride()[:3], qkv.stride(0),
        HEADS=heads, KV_HEADS=kv_heads, GROUP=max(merged_group, 16), DIM=head_dim,
        PAGE=keys.shape[1], SPLITS=tile.splits, BLOCK=tile.tokens,
        MERGED=min(max(MERGED_NUMBERS // (merged_group * head_dim), 1), tile.splits),
        MERGED_GROUP=merged_group, NORM=True, STAGES=tile.stages, PDL=pdl, LATER=later,
        num_warps=tile.warps, **options,
    )  # fmt: skip


class Chain:
    """The layers of a decode step, with random weights, keys and values."""

    def __init__(self, shape: Shape, rows: int, context: int, device: str) -> None:
        self.shape, self.rows = shape, rows
        made = torch.Generator(device).manual_seed(0)

        def noise(*size: int, scale: float = 1.0) -> Tensor:
            drawn = torch.randn(*size, generator=made, device=device) * scale
            return drawn.to(torch.bfloat16)

        width, dim = shape.heads * shape.head_dim, shape.head_dim
        all_heads = shape.heads + 2 * shape.kv_heads
        self.layers = [
            {
                "qkv": noise(all_heads * dim, shape.hidden, scale=shape.hidden**-0.5),
                "out": noise(shape.hidden, width, scale=width**-0.5),
                "gate_up": noise(2 * shape.intermediate, shape.hidden, scale=shape.hidden**-0.5),
                "down": noise(shape.hidden, shape.intermediate, scale=shape.intermediate**-0.5),
                "norm": 1 + noise(shape.hidden, scale=0.1),
                "heads": 1 + noise(shape.heads + shape.kv_heads, dim, scale=0.1),
            }
            for _ in range(shape.layers)
        ]
        columns = -(-(context + 1) // PAGE)
        self.pools = [
            noise(1 + rows * columns, 2, PAGE, shape.kv_heads, dim) for _ in range(shape.layers)
        ]
        table = 1 + torch.randperm(rows * columns, generator=made, device=device)
        self.table = table.view(rows, columns).to(torch.int32)
        # Rows of somewhat different lengths; the last token of each is its own.
        lens = (context - torch.arange(rows, device=device) % 7).clamp(min=1)
        self.lens = lens.to(torch.int32)
        self.positions = (lens - 1).long()
        page = self.table.gather(1, (self.positions // PAGE)[:, None])[:, 0].long()
        self.slots = page * PAGE + self.positions % PAGE
        angles = torch.outer(
            torch.arange(context + 1, device=device).float(),
            1e6 ** (-torch.arange(0, dim, 2, device=device).float() / dim),
        )
        self.rope = torch.stack([angles.cos(), angles.sin()], 1).contiguous()
        self.start = noise(rows, shape.hidden)
        self.stream = self.start.clone()
        processors = 132
        if device == "cuda":
            processors = torch.cuda.get_device_properties(0).multi_processor_count
        sizes = {"heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": dim}
        self.tile = choose_tile(rows, **sizes, processors=processors)
        self.parts = PartialSums.new(
            rows=rows, parts=rows * self.tile.splits, **sizes, device=torch.device(device)
        )
        self.layer = LayerInfo(index=0, group=0, scale=dim**-0.5)
        self.attended = torch.empty(rows, shape.heads, dim, dtype=torch.bfloat16, device=device)

    def attend(self, number: int, qkv: Tensor, *, fused: bool, later: bool) -> Tensor:
        """Attention of a layer by one kernel or by two.   writes: the layer's pool"""
        weights, pool = self.layers[number], self.pools[number]
        if fused:
            attend_with_heads(
                qkv, weights["heads"], self.rope, pool, self.lens, self.table, self.layer,
                self.attended, self.parts, tile=self.tile, pdl=True, later=later,
            )  # fmt: skip
            return self.attended
        q = rope_and_store_kv(
            qkv, weights["heads"], self.rope, self.positions, self.slots, pool,
            heads=self.shape.heads, eps=EPS, pdl=not INTERPRETED,
        )  # fmt: skip
        attend_decode_rows(
            q, pool[:, 0], pool[:, 1], self.lens, self.table, self.layer, self.attended, None,
            self.parts, tile=self.tile, pdl=True,
        )  # fmt: skip
        return self.attended

    def run(self, fused: bool, later: bool, *, attention: bool = True) -> Tensor:
        """All layers once.   writes: the stream, the pools"""
        self.stream.copy_(self.start)
        pdl = not INTERPRETED
        for number, weights in enumerate(self.layers):
            qkv = small_linear(self.stream, weights["qkv"], norm=weights["norm"], eps=EPS, pdl=pdl)
            if attention:
                self.attend(number, qkv, fused=fused, later=later)
            small_linear(self.attended.flatten(1), weights["out"], total=self.stream, pdl=pdl)
            inner = small_linear(
                self.stream, weights["gate_up"], norm=weights["norm"], eps=EPS, gated=True, pdl=pdl
            )
            small_linear(inner, weights["down"], total=self.stream, pdl=pdl)
        return self.stream


def check(chain: Chain) -> dict[str, Any]:
    """Whether both ways give the same bits, of the stream and of what the pools have."""
    before = [pool.clone() for pool in chain.pools]
    found = []
    for way in WAYS.values():
        for pool, kept in zip(chain.pools, before, strict=True):
            pool.copy_(kept)
        streams = [chain.run(*way).clone() for _ in range(2)]
        found.append((streams, [pool.clone() for pool in chain.pools]))
    (plain, plain_pools), *others = found
    same = [*plain, *(each for streams, _ in others for each in streams)]
    return {
        "stream": all(torch.equal(plain[0], each) for each in same),
        "pools": all(all(map(torch.equal, plain_pools, pools)) for _, pools in others),
        "written": not all(map(torch.equal, plain_pools, before)),
        "finite": bool(plain[0].isfinite().all()),
    }


def time_graph(run: Callable[[], object]) -> float:
    """Microseconds of a replay, the median."""
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end))
    return statistics.median(times)


def main() -> int:
    """Print what was found; 1 where bits differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    found: list[dict[str, Any]] = []
    on_gpu = asked.device == "cuda"
    for shape, rows in CASES if on_gpu else ((TINY, 1), (TINY, 3)):
        for context in CONTEXTS if on_gpu else (1, 40, 300):
            chain = Chain(shape, rows, context, asked.device)
            result: dict[str, Any] = {"hidden": shape.hidden, "layers": shape.layers}
            result |= {"rows": rows, "context": context, "same": check(chain)}
            if on_gpu:
                # In turns, there and back: clocks wander.
                for name in (*WAYS, *reversed(WAYS)):
                    took = time_graph(partial(chain.run, *WAYS[name])) / shape.layers
                    result.setdefault(f"{name}, us a layer", []).append(round(took, 2))
                rest = time_graph(partial(chain.run, False, False, attention=False))
                result["without attention, us a layer"] = round(rest / shape.layers, 2)
            found.append(result)
            sys.stderr.write(json.dumps(result) + "\n")
            if asked.out is not None:
                asked.out.write_text(json.dumps(found, indent=1))
            del chain
    return 0 if all(all(each["same"].values()) for each in found) else 1


if __name__ == "__main__":
    sys.exit(main())
