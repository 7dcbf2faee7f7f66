"""Experts of the 30B-A3B shape on the GPU: right, how fast beside torch's grouped product, and by
which tiles best.

    export PYTHONPATH=core/src:plugins/conformance/src:plugins/triton-ops/src:tests:tests/support
    python tests/gpu/expert_times.py OUT

Writes OUT/expert_times.json, after each number of tokens anew, and the best tiles as
OUT/GPU-128-8-2048-768.json, which belongs in the folder `measured` of headstock_triton.
Microseconds are those of launches inside a graph, with other experts each time; kernels are
compiled before, in processes beside each other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from attrs import asdict, frozen
from expert_cases import Mixture, draw_tokens, draw_weights
from gpu.expert_shares import (
    DEVICE,
    DTYPE,
    EXPERTS,
    HIDDEN,
    ROWS,
    list_row_tiles,
    list_tiles,
    multiply,
)
from gpu.op_times import median_us
from ops_cases import noise
from torch import Tensor

from headstock.nn import moe
from headstock.spi import Weight
from headstock_triton.expert_rows import mix_rows
from headstock_triton.expert_terms import combine_terms
from headstock_triton.experts import fused_mix_experts
from headstock_triton.pair_blocks import Blocks
from headstock_triton.routing import route_tokens
from headstock_triton.tiles import RowTile, Tile, Tiles

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
ROW_TOKENS = 8
"""Tokens up to which pairs are tried one by one."""
EXPERT_SIZE = 3 * EXPERTS.intermediate * HIDDEN
"""Numbers of an expert's weights."""

Step = tuple[Tensor, Tensor]


@frozen(eq=False)
class Sweep:
    """A layer's weights, numbers that stand for what gate and up made, and what went wrong so far,
    by name.
    """

    gate_up: Tensor
    down: Tensor
    inner: Tensor
    fails: dict[str, str]

    def attempt(self, name: str, work: Callable[[], float]) -> float:
        """What the work gives; infinity if it fails, which is noted."""
        try:
            return work()
        except Exception as problem:
            self.fails[name] = f"{type(problem).__name__}: {' '.join(str(problem).split())[:200]}"
            return float("inf")

    def time_torch(self, steps: list[Step]) -> float:
        """Microseconds of torch's grouped products with all that belongs to them."""
        works = [
            lambda x=x, s=s: moe.mix_experts(x, *moe.route(s, EXPERTS), self.gate_up, self.down)
            for x, s in steps
        ]
        return time_us(works)

    def time_whole(self, steps: list[Step], tiles: RowTile | Tiles) -> float:
        """Microseconds of a layer's experts by those tiles, from scores to sums."""
        works = [
            lambda x=x, s=s: fused_mix_experts(x, s, EXPERTS, self.gate_up, self.down, tiles=tiles)
            for x, s in steps
        ]
        return time_us(works)

    def time_rows(self, steps: list[Step], tile: RowTile) -> float:
        """Microseconds of both products of pairs one by one."""
        routed = [(x, route_tokens(scores, EXPERTS)[0]) for x, scores in steps]
        maps = Weight(tensor=self.gate_up), Weight(tensor=self.down)
        return time_us([lambda x=x, r=r: mix_rows(x, r, *maps, tile) for x, r in routed])

    def time_tile(
        self, name: str, routed: list[tuple[Tensor, Blocks]], tile: Tile, like: list[Tensor]
    ) -> float:
        """Microseconds of one product.

        like: what the first tile made, or nothing yet
        writes: like
        """

        def work(x: Tensor, blocks: Blocks) -> Tensor:
            return multiply(name, x, self.inner, blocks, self.gate_up, self.down, tile)

        made = work(*routed[0]).float()
        if name == "gate_up":
            table, rows = routed[0][1].table, routed[0][1].rows
            made = made.view(-1, rows, made.shape[1])[
                torch.arange(rows, device=DEVICE) < table[:, 1:]
            ]
        if not like:
            like.append(made)
        off = float((made - like[0]).abs().max() / like[0].abs().max())
        assert off < 2.0**-6, f"off by {off:.1e} of the largest"
        return time_us([lambda x=x, b=b: work(x, b) for x, b in routed])

    def find_tiles(
        self, rows: int, steps: list[Step], found: dict[str, Any]
    ) -> tuple[float, Tiles]:
        """The best tiles for blocks of `rows`, and their microseconds with the sum.

        writes: found, all of them
        """
        routed = [
            (x, blocks)
            for x, s in steps
            if (blocks := route_tokens(s, EXPERTS, rows=rows)[1]) is not None
        ]
        best: dict[str, tuple[float, Tile]] = {}
        for name, tiles in list_tiles(rows).items():
            like: list[Tensor] = []
            times: dict[str, float] = {}
            for tile in tiles:
                label = f"{name}, {len(steps[0][0])} tokens, {rows} rows, {describe(tile)}"
                measure = partial(self.time_tile, name, routed, tile, like)
                times[describe(tile)] = self.attempt(label, measure)
            found[f"{name}, {rows} rows"] = dict(
                sorted(times.items(), key=lambda each: each[1])[:12]
            )
            best[name] = min(zip(times.values(), tiles, strict=True), key=lambda each: each[0])
        terms = noise(len(steps[0][0]) * EXPERTS.per_token, HIDDEN, dtype=DTYPE, device=DEVICE)
        summed = time_us([lambda b=b: combine_terms(terms, b) for _, b in routed])
        found[f"combine, {rows} rows"] = summed
        total = best["gate_up"][0] + best["down"][0] + summed
        return total, Tiles(rows=rows, gate_up=best["gate_up"][1], down=best["down"][1])

    def measure(self, tokens: int) -> dict[str, Any]:
        """Microseconds of torch's way and of ours by parts, and the best tiles."""
        seeds = range(max(2, min(16, 256 // tokens)))
        steps = [
            tuple(
                noise(tokens, width, dtype=DTYPE, device=DEVICE, seed=seed)
                for width in (HIDDEN, 128)
            )
            for seed in seeds
        ]
        distinct = sum(route_tokens(s, EXPERTS)[0].ids.unique().numel() for _, s in steps) / len(
            steps
        )
        found: dict[str, Any] = {"tokens": tokens, "experts": round(distinct, 1)}
        found["torch"] = self.attempt(f"torch, {tokens} tokens", lambda: self.time_torch(steps))
        ways: list[tuple[float, RowTile | Tiles]] = [
            self.find_tiles(rows, steps, found)
            for rows, (least, most) in ROWS.items()
            if least <= tokens <= most
        ]
        for tile in list_row_tiles() if tokens <= ROW_TOKENS else ():
            us = self.attempt(f"rows, {tokens} tokens, {tile}", lambda: self.time_rows(steps, tile))  # noqa: B023
            found.setdefault("rows", {})[f"{tile.gate_up} {tile.down} w{tile.warps}"] = us
            ways.append((us, tile))
        best = min(ways, key=lambda way: way[0])[1]
        rows = best.rows if isinstance(best, Tiles) else 0
        found["whole"] = us = self.attempt(
            f"whole, {tokens} tokens", lambda: self.time_whole(steps, best)
        )
        found["route"] = time_us(
            [lambda s=s: route_tokens(s, EXPERTS, rows=rows) for _, s in steps]
        )
        found["gb_s"] = round(distinct * EXPERT_SIZE * 2 / us / 1e3, 1)
        found["tflop_s"] = round(tokens * EXPERTS.per_token * EXPERT_SIZE * 2 / us / 1e6, 1)
        return found | {"tiles": asdict(best)}


def describe(tile: Tile) -> str:
    """A tile in few letters."""
    marks = f"{' swap' if tile.swap else ''}{' tma' if tile.tma else ''}"
    return f"{tile.n}x{tile.k} s{tile.stages} w{tile.warps} g{tile.group}{marks}"


def capture(works: list[Callable[[], object]]) -> tuple[torch.cuda.CUDAGraph, list[object]]:
    """A graph of the works, done once before. `torch.cuda.graph` would empty torch's cache of
    memory each time.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        for work in works:
            work()
        side.synchronize()
        graph.capture_begin()
        made = [work() for work in works]
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(side)
    return graph, made


def time_us(works: list[Callable[[], object]]) -> float:
    """The median of what one takes inside a graph of all."""
    graph, _ = capture(works)
    return round(median_us(graph.replay, 5) / len(works), 2)


def check_graph(gate_up: Tensor, down: Tensor) -> float:
    """A graph's replays follow other tokens, and give what the same call gives outside, bit by
    bit.
    """
    for tokens in (1, 16, 300):
        case = Mixture(tokens=tokens, count=128, chosen=8, hidden=HIDDEN, inters=768)
        x, scores = draw_tokens(case, DTYPE, DEVICE)
        graph, (found,) = capture(
            [lambda x=x, scores=scores: fused_mix_experts(x, scores, EXPERTS, gate_up, down)]
        )
        for seed in (5, 6):
            for target, other in zip(
                (x, scores), draw_tokens(case, DTYPE, DEVICE, seed=seed), strict=True
            ):
                target.copy_(other)
            graph.replay()
            expected = fused_mix_experts(x, scores, EXPERTS, gate_up, down)
            assert isinstance(found, Tensor) and torch.equal(found, expected), (
                f"{tokens} tokens in a graph"
            )
    return 0.0


def run_shares(out: Path, fails: dict[str, str]) -> dict[str, float]:
    """Compile the kernels and do the checks, in as many processes as there are cores.

    returns: the largest errors by check    writes: fails
    """
    count = max((os.cpu_count() or 4) - 1, 1)
    script = str(Path(__file__).with_name("expert_shares.py"))
    commands = [
        [sys.executable, script, str(index), str(count), str(out)] for index in range(count)
    ]
    errors: dict[str, float] = {}
    for index, running in enumerate([subprocess.Popen(command) for command in commands]):
        if running.wait() != 0:
            fails[f"share {index}"] = f"ended with {running.returncode}"
            continue
        part = out / f"share-{index}.json"
        found = json.loads(part.read_text())
        part.unlink()
        errors |= found["errors"]
        fails |= found["failed"]
    return errors


def main(builds: list[object]) -> dict[str, Any]:
    """Right or wrong, then times; the tables go to the folder that GPU_OUT names."""
    out, began = Path(os.environ["GPU_OUT"]), time.monotonic()
    fails: dict[str, str] = {}
    errors = run_shares(out, fails)
    seconds = {"shares": round(time.monotonic() - began, 1)}
    sys.stderr.write(
        f"{len(errors)} checks right, {len(fails)} wrong after {seconds['shares']} s\n"
    )
    gate_up, down = draw_weights(
        Mixture(tokens=1, count=128, chosen=8, hidden=HIDDEN, inters=768), DTYPE, DEVICE
    )
    sweep = Sweep(
        gate_up, down, noise(8192 * 8 + 128 * 128, 768, dtype=DTYPE, device=DEVICE), fails
    )
    sweep.attempt("graph", lambda: check_graph(gate_up, down))
    gpu = torch.cuda.get_device_name()
    name = "-".join([gpu.replace(" ", "_"), "128", "8", str(HIDDEN), "768"])
    times: list[dict[str, Any]] = []
    result = {"failed": fails, "errors": errors, "times": times, "seconds": seconds, "device": gpu}
    for tokens in TOKENS:
        began = time.monotonic()
        times.append(sweep.measure(tokens))
        seconds[str(tokens)] = round(time.monotonic() - began, 1)
        wanted = ("tokens", "experts", "torch", "whole", "route", "gb_s", "tflop_s", "tiles")
        sys.stderr.write(json.dumps({each: times[-1][each] for each in wanted}) + "\n")
        tiles = {str(each["tokens"]): each["tiles"] for each in times}
        table = {"torch": torch.__version__, "triton": triton.__version__, "tiles": tiles}
        (out / f"{name}.json").write_text(json.dumps(table, indent=1) + "\n")
        (out / "expert_times.json").write_text(json.dumps(result, indent=1))
    return result | {"ok": not fails}


if __name__ == "__main__":
    os.environ["GPU_OUT"] = sys.argv[1]
    found = main([])
    sys.stderr.write(json.dumps(found["failed"], indent=1)[:4000] + "\n")
    sys.exit(0 if found["ok"] else 1)
