"""Tiles of products with quantized maps: microseconds of each, and how near its sums are.

    PYTHONPATH=tests:tests/support python -m gpu.tile_sweep OUT.jsonl [SECONDS [PROCESSES]]

All processes but the first compile a share of the variants each, so that the first finds them on
disk. Maps lie in more copies than the L2 cache holds, and a call is timed inside a CUDA graph.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
from gpu.quant_products import CACHE_BYTES, GROUP, Product, time_products

from headstock.spi import Weight, WeightFormat, WeightKind
from headstock.weights import quantize
from headstock_triton.fp8_linear import LEAST_TOKENS, Fp8Map, multiply_exact_rows
from headstock_triton.fp8_rows import RowForm, quantize_rows
from headstock_triton.packed import prepare_map
from headstock_triton.split_sums import PartTile
from headstock_triton.word_linear import multiply_words
from headstock_triton.word_maps import WordMap

SHAPES = {  # out, in, gated: those of 8B, and of its halves on two ranks
    "qkv": (6144, 4096, False),
    "o": (4096, 4096, False),
    "gate_up": (24576, 4096, True),
    "down": (4096, 12288, False),
}
KINDS = {
    "int4": WeightFormat(kind=WeightKind.INT4, group=(1, GROUP), has_zeros=True),
    "fp8": WeightFormat(kind=WeightKind.FP8_E4M3, group=(1, 1 << 20)),
}
ROWS = (1, 8)


def list_tiles(kind: str) -> Iterator[PartTile]:
    """The tiles to try, the shipped ones among them."""
    for rows, warps, stages, parts in itertools.product(
        (32, 64, 128), (2, 4, 8), (3, 4, 6), (1, 2, 4, 8, 16)
    ):
        if (rows == 32) != (warps == 2) or (rows == 128 and warps == 4):
            continue
        tokens = LEAST_TOKENS if kind == "fp8" else 8
        yield PartTile(rows=rows, tokens=tokens, parts=parts, warps=warps, stages=stages)


def make_weight(kind: str, outs: int, width: int) -> tuple[torch.Tensor, Weight]:
    """A random map in bfloat16, and the same as operations keep it."""
    noise = torch.Generator("cuda").manual_seed(0)
    plain = torch.randn(outs, width, generator=noise, device="cuda") / width**0.5
    plain = plain.bfloat16()
    format = KINDS[kind]
    assert format.group is not None
    group = (1, min(format.group[1], width))
    stored = quantize(
        plain, WeightFormat(kind=format.kind, group=group, has_zeros=format.has_zeros)
    )
    return plain, prepare_map(stored, torch.bfloat16)


def multiply(x: torch.Tensor, weight: Weight, tile: PartTile, gated: bool) -> torch.Tensor:
    """The product by the map's kernel, and its activation where the kernel has it."""
    if isinstance(weight, WordMap):
        return multiply_words(x, weight, gated=gated, tile=tile)
    assert isinstance(weight, Fp8Map), "prepared otherwise"
    return multiply_exact_rows(quantize_rows(x, RowForm.EXACT), weight, tile=tile)


def find_steps(weight: Weight) -> int:
    """The steps of a program without parts, which these divide."""
    return weight.tensor.shape[1] if isinstance(weight, WordMap) else weight.tensor.shape[1] // 128


def list_variants() -> Iterator[tuple[str, str, list[PartTile], Weight, torch.Tensor]]:
    """(kind, shape, tiles, prepared map, plain map) by kind and shape."""
    for kind, (shape, (outs, width, _)) in itertools.product(KINDS, SHAPES.items()):
        plain, weight = make_weight(kind, outs, width)
        steps = find_steps(weight)
        tiles = [tile for tile in list_tiles(kind) if steps % tile.parts == 0]
        yield kind, shape, tiles, weight, plain


def compile_share(number: int, count: int) -> None:
    """Run every `count`th variant once."""
    seen = 0
    for _, shape, tiles, weight, plain in list_variants():
        x = torch.ones(1, plain.shape[1], device="cuda", dtype=torch.bfloat16)
        for tile in tiles:
            seen += 1
            if seen % count == number:
                try_variant(partial(multiply, x, weight, tile, SHAPES[shape][2]))
    torch.cuda.synchronize()


def try_variant(work: Any) -> str:
    """Why it does not run; empty when it does."""
    try:
        work()
    except Exception as error:  # too much shared memory, and the like
        return repr(error)[:120]
    return ""


def time_variants(out: Path, seconds: float) -> None:
    """Append a line for each variant.   writes: out"""
    end = time.monotonic() + seconds
    for kind, shape, tiles, weight, plain in list_variants():
        _, width, gated = SHAPES[shape]
        copies = -(-CACHE_BYTES // weight.nbytes)
        maps = [weight, *(make_copy(weight) for _ in range(copies - 1))]
        for rows, tile in itertools.product(ROWS, tiles):
            if time.monotonic() > end:
                return
            x = torch.randn(rows, width, device="cuda").bfloat16()
            line: dict[str, Any] = {"kind": kind, "shape": shape, "tokens": rows}
            line |= {name: getattr(tile, name) for name in ("rows", "parts", "warps", "stages")}
            fault = try_variant(partial(multiply, x, weight, tile, gated))
            if fault:
                line["failed"] = fault
            else:
                products: list[Product] = [
                    partial(run_copy, weight=each, tile=tile, gated=gated) for each in maps
                ]
                exact = x.float() @ plain.float().t()
                if gated and isinstance(weight, WordMap):
                    gate, up = exact.chunk(2, -1)
                    exact = torch.nn.functional.silu(gate) * up
                error = (products[0](x).float() - exact).norm() / exact.norm()
                line |= {
                    "error": round(float(error), 4),
                    "us": round(time_products(products, x), 2),
                }
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def run_copy(x: torch.Tensor, *, weight: Weight, tile: PartTile, gated: bool) -> torch.Tensor:
    """`multiply`, its map by name."""
    return multiply(x, weight, tile, gated)


def make_copy(weight: Weight) -> Weight:
    """The map at other addresses."""
    tensors = {
        each.name: value.clone()
        for each in attrs.fields(type(weight))
        if isinstance(value := getattr(weight, each.name), torch.Tensor)
    }
    return attrs.evolve(weight, **tensors)


def main() -> None:
    """Compile in processes, then time."""
    if sys.argv[1] == "--share":
        compile_share(int(sys.argv[2]), int(sys.argv[3]))
        return
    given = [*sys.argv[2:], *("300", "16")[len(sys.argv) - 2 :]]
    out, seconds, count = Path(sys.argv[1]), int(given[0]), int(given[1])
    command = [sys.executable, "-m", "gpu.tile_sweep", "--share"]
    shares = [subprocess.Popen([*command, str(number), str(count)]) for number in range(count)]
    for share in shares:
        share.wait()
    time_variants(out, seconds)


if __name__ == "__main__":
    main()
