"""Time tiles of experts in 4 bits at the shape of GPT-OSS 20B, and check each.

    export PYTHONPATH=core/src:plugins/conformance/src:plugins/triton-ops/src:tests/support
    python tests/gpu/expert_words.py OUT.jsonl [SECONDS [PATTERN]]

Kernels are compiled by several processes first. A time is that of a layer's experts inside a graph,
with other tokens and experts in each call: routes, both products and the sum. Each line has a
format, a number of tokens, a tile, microseconds of the whole and of either product, the error
beside float32 over the numbers that the weights stand for, and whether bits are the same in another
run and with the tokens in another order.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from attrs import evolve, frozen
from torch import Tensor

from headstock.nn import moe
from headstock.spi import ClampedGate, Weight, WeightFormat, WeightKind
from headstock.weights import dequantize_
from headstock_triton.expert_gates import ExpertGate
from headstock_triton.expert_terms import combine_terms
from headstock_triton.experts import mix_chosen_experts
from headstock_triton.packed import prepare_experts
from headstock_triton.pair_blocks import Blocks, arrange_pairs
from headstock_triton.word_experts import WordExperts
from headstock_triton.word_tiles import (
    WordTile,
    choose_word_tile,
    multiply_down_words,
    multiply_gate_up_words,
)

COUNT, PER_TOKEN, HIDDEN, INTERS, LAYERS = 32, 4, 2880, 2880, 24
GATE = ClampedGate(limit=7.0, slope=1.702)
TOKENS = (1, 4, 16, 64, 256, 2048)
FORMATS = {
    "mxfp4": WeightFormat(kind=WeightKind.FP4_E2M1, group=(1, 32)),
    "int4": WeightFormat(kind=WeightKind.INT4, group=(1, 128), has_zeros=True),
    "int4 by 32": WeightFormat(kind=WeightKind.INT4, group=(1, 32)),
}
MOST_ERROR = 0.01
"""Of results, for which what gate and up make is rounded to bfloat16 once."""
CALLS = 6
"""Of a graph, each with other tokens."""

NARROW = WordTile(rows=8, outs=32, warps=2, stages=6)
HALF = WordTile(rows=16, outs=64, warps=4, stages=5)
WIDE = WordTile(rows=64, outs=128, warps=8, stages=3, group=4)
FEW = (
    NARROW,
    evolve(NARROW, parts=2),
    evolve(NARROW, stages=4),
    evolve(NARROW, stages=8),
    evolve(NARROW, outs=16, warps=1),
    evolve(NARROW, outs=64),
    evolve(NARROW, rows=16),
    HALF,
    evolve(HALF, parts=2),
)
SOME = (
    evolve(NARROW, rows=16),
    evolve(NARROW, rows=32, outs=64),
    HALF,
    evolve(HALF, rows=32),
    evolve(HALF, rows=32, stages=4, group=4),
    evolve(WIDE, rows=32),
    evolve(HALF, rows=64, stages=3),
)
MANY = (
    evolve(HALF, rows=64, stages=3),
    WIDE,
    evolve(WIDE, group=8),
    evolve(WIDE, rows=128),
    evolve(WIDE, rows=128, group=8),
    evolve(WIDE, rows=128, stages=2, group=8),
    evolve(WIDE, rows=128, outs=64, warps=4, group=8),
)
TILES = {1: FEW, 4: FEW, 16: (*FEW, *SOME), 64: SOME, 256: (*SOME, *MANY), 2048: MANY}


def draw_experts(format: WeightFormat, count: int, outs: int, width: int, seed: int) -> Weight:
    """Packed experts with biases, of about the size of a trained map."""
    assert format.group is not None
    made = torch.Generator("cuda").manual_seed(seed)
    numbers = torch.randint(
        0, 256, (count, outs, width // 2), generator=made, device="cuda", dtype=torch.uint8
    )
    groups = (count, outs, -(-width // format.group[1]))
    scales = 2.0 ** torch.randint(-10, -7, groups, generator=made, device="cuda").float()
    zeros = None
    if format.kind is WeightKind.INT4:
        scales *= 1.25
        if format.has_zeros:
            zeros = torch.randint(6, 11, groups, generator=made, device="cuda").to(torch.int8)
    bias = torch.randn(count, outs, generator=made, device="cuda").to(torch.bfloat16)
    return Weight(tensor=numbers, scales=scales, zeros=zeros, format=format, bias=bias)


@frozen(eq=False)
class Step:
    """Tokens, and the experts that they chose."""

    x: Tensor
    shares: Tensor
    ids: Tensor

    @classmethod
    def draw(cls, tokens: int, seed: int) -> Step:
        """Experts by random scores."""
        made = torch.Generator("cuda").manual_seed(seed)
        x = torch.randn(tokens, HIDDEN, generator=made, device="cuda").to(torch.bfloat16)
        scores = torch.randn(tokens, COUNT, generator=made, device="cuda")
        best = scores.topk(PER_TOKEN, -1)
        return cls(x, best.values.softmax(-1).to(torch.bfloat16), best.indices)

    def flip(self) -> Step:
        """The same tokens in another order."""
        return Step(*(each.flip(0).contiguous() for each in (self.x, self.shares, self.ids)))

    def arrange(self, tile: WordTile) -> Blocks:
        """The blocks of the tile."""
        return arrange_pairs(self.ids, self.shares, COUNT, rows=tile.rows)


def mix(step: Step, gate_up: WordExperts, down: WordExperts, tile: WordTile) -> Tensor:
    """A layer's experts by that tile."""
    blocks = step.arrange(tile)
    inner = multiply_gate_up_words(step.x, blocks, gate_up, tile, ExpertGate.of(GATE))
    return combine_terms(multiply_down_words(inner, blocks, down, tile), blocks, step.x.dtype)


def time_calls(works: list[Callable[[], object]]) -> float:
    """Microseconds of one of them, inside a graph of all."""
    for work in works:
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [work() for work in works]
    times = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / len(works))
    del kept
    return round(statistics.median(times), 1)


def measure_tile(
    steps: list[Step], gate_up: WordExperts, down: WordExperts, tile: WordTile, exact: Tensor
) -> dict[str, object]:
    """Whether the tile is right, and its times."""
    found = mix(steps[0], gate_up, down, tile)
    error = float((found.float() - exact).norm() / exact.norm())
    turned = mix(steps[0].flip(), gate_up, down, tile).flip(0)
    blocks = [step.arrange(tile) for step in steps]
    inner = [
        multiply_gate_up_words(step.x, each, gate_up, tile)
        for step, each in zip(steps, blocks, strict=True)
    ]
    return {
        "error": round(error, 5),
        "is_right": error < MOST_ERROR,
        "is_repeated": torch.equal(mix(steps[0], gate_up, down, tile), found),
        "is_same_elsewhere": torch.equal(turned, found),
        "us": time_calls([lambda s=s: mix(s, gate_up, down, tile) for s in steps]),
        "gate_up_us": time_calls(
            [
                lambda s=s, b=b: multiply_gate_up_words(s.x, b, gate_up, tile)
                for s, b in zip(steps, blocks, strict=True)
            ]
        ),
        "down_us": time_calls(
            [
                lambda i=i, b=b: multiply_down_words(i, b, down, tile)
                for i, b in zip(inner, blocks, strict=True)
            ]
        ),
    }


def measure_plain(steps: list[Step], weights: list[Weight]) -> dict[str, object]:
    """The times of experts in bfloat16: by kernels, and by torch's grouped products."""
    biases = (weights[0].bias, weights[1].bias)
    assert biases[0] is not None
    assert biases[1] is not None
    both = (biases[0], biases[1])
    maps = (weights[0].tensor, weights[1].tensor)
    return {
        "us": time_calls(
            [lambda s=s: mix_chosen_experts(s.x, s.shares, s.ids, *weights, GATE) for s in steps]
        ),
        "torch_us": time_calls(
            [
                lambda s=s: moe.mix_experts(s.x, s.shares, s.ids, *maps, GATE, biases=both)
                for s in steps
            ]
        ),
    }


def run_contest(end: float, wanted: str) -> Iterator[dict[str, object]]:
    """Every tile whose format, tokens and name match, until the time is over."""
    for name, format in FORMATS.items():
        weights, packed, plain = [], [], []
        for seed, (outs, width) in enumerate(((2 * INTERS, HIDDEN), (HIDDEN, INTERS))):
            weight = draw_experts(format, COUNT, outs, width, seed)
            numbers = torch.empty(COUNT, outs, width, device="cuda")
            dequantize_(weight, numbers)
            began = time.monotonic()
            ready = prepare_experts(weight)
            torch.cuda.synchronize()
            assert isinstance(ready, WordExperts)
            taken = time.monotonic() - began
            yield {"format": name, "outs": outs, "bytes": ready.nbytes, "prepare_s": taken}
            packed.append(ready)
            plain.append(numbers)
            weights.append(Weight(tensor=numbers.to(torch.bfloat16), bias=weight.bias))
        size = LAYERS * sum(each.nbytes for each in packed) / 2**30
        yield {"format": name, "experts_gib": round(size, 2)}
        biases = tuple(each.bias.float() for each in packed if each.bias is not None)
        for tokens, tiles in TILES.items():
            steps = [Step.draw(tokens, 10 + call) for call in range(CALLS)]
            first = steps[0]
            x, shares = first.x.float(), first.shares.float()
            exact = moe.mix_experts(x, shares, first.ids, *plain, GATE, biases=(*biases,))
            rule = choose_word_tile(tokens, PER_TOKEN, COUNT, max(each.groups for each in packed))
            line: dict[str, object] = {"format": name, "tokens": tokens}
            if name == "mxfp4" and re.search(wanted, f"{name} {tokens} bf16"):
                yield {"format": "bf16", "tokens": tokens, **measure_plain(steps, weights)}
            for tile in dict.fromkeys((rule, *tiles)):
                if not re.search(wanted, f"{name} {tokens} {tile}"):
                    continue
                if time.monotonic() > end:
                    return
                line = {"format": name, "tokens": tokens, "tile": str(tile), "rule": tile == rule}
                try:
                    yield line | measure_tile(steps, packed[0], packed[1], tile, exact)
                except Exception as error:
                    yield line | {"failed": repr(error)[:300]}
        del weights, packed, plain
        torch.cuda.empty_cache()


def compile_tile(work: tuple[str, WordTile]) -> str:
    """Compile both products of a tile, by a launch without rows; returns an error or ""."""
    name, tile = work
    try:
        step, packed = Step.draw(1, 0), []
        for outs, width in ((2 * INTERS, HIDDEN), (HIDDEN, INTERS)):
            ready = prepare_experts(draw_experts(FORMATS[name], 1, outs, width, 0))
            assert isinstance(ready, WordExperts)
            packed.append(ready)
        blocks = step.arrange(tile)
        blocks.table.zero_()
        for gate in (GATE, None):
            found = ExpertGate() if gate is None else ExpertGate.of(gate)
            inner = multiply_gate_up_words(step.x, blocks, packed[0], tile, found)
        multiply_down_words(inner, blocks, packed[1], tile)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{work}: {error!r}"[:300]
    return ""


def list_kernels(wanted: str) -> list[tuple[str, WordTile]]:
    """The formats and tiles that need kernels."""
    works: dict[tuple[str, WordTile], None] = {}
    for name in FORMATS:
        for tokens, tiles in TILES.items():
            groups = {"mxfp4": 0, "int4": 1, "int4 by 32": 4}[name]
            rule = choose_word_tile(tokens, PER_TOKEN, COUNT, groups)
            for tile in (rule, *tiles):
                if re.search(wanted, f"{name} {tokens} {tile}"):
                    works[(name, tile)] = None
    return list(works)


if __name__ == "__main__":
    began = time.monotonic()
    seconds, wanted = (*sys.argv[2:], *("280", "")[len(sys.argv) - 2 :])
    with Path(sys.argv[1]).open("w", buffering=1) as file:

        def report(line: dict[str, object]) -> None:
            print(json.dumps(line), file=file)
            sys.stdout.write(f"{json.dumps(line)}\n")

        pool = ProcessPoolExecutor(
            min(16, os.cpu_count() or 1), mp_context=multiprocessing.get_context("spawn")
        )
        with pool:
            for failed in pool.map(compile_tile, list_kernels(wanted)):
                if failed:
                    report({"not_compiled": failed})
        report(
            {
                "device": torch.cuda.get_device_name(),
                "compiled_s": round(time.monotonic() - began, 1),
            }
        )
        for found in run_contest(began + float(seconds), wanted):
            report(found)
        report({"took_s": round(time.monotonic() - began, 1)})
