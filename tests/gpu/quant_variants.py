"""Time variants of products of a few rows by quantized weights, and check each.

    python tests/gpu/quant_variants.py OUT.jsonl [SECONDS [PATTERN]]
    TRITON_INTERPRET=1 python tests/gpu/quant_variants.py check

Kernels are compiled by several processes first. Weights lie in more copies than the second-level
cache holds, and a product is timed in a CUDA graph over all of them. Each line has a variant, a
shape, a number of rows, microseconds, the error beside the numbers that the weight stands for, and
whether a row's bits are the same alone, in other places and in other runs.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import quant_packing
import torch
import triton
import triton.language as tl
from attrs import evolve, frozen
from quant_packing import prepare
from quant_products import (
    CACHE_BYTES,
    SHAPES,
    Product,
    describe_rows,
    make_bf16,
    make_packed,
    time_products,
)
from quant_words import WordTile, compile_words, count_tokens, multiply_words

from headstock.spi import WeightFormat, WeightKind
from headstock_triton.fp8_rows import Fp8Rows, quantize_rows

NAMES = ("8b.qkv", "8b.o", "8b.gate_up", "8b.down")
ROWS = (1, 8, 16, 32, 64)
BITS = {"fp8": 8, "int4": 4, "mxfp4": 4}
NOW = {
    "fp8": WeightFormat(kind=WeightKind.FP8_E4M3),
    "int4": WeightFormat(kind=WeightKind.INT4, group=(1, 128), has_zeros=True),
    "mxfp4": WeightFormat(kind=WeightKind.FP4_E2M1, group=(1, 32)),
}
MOST_ERROR = 0.004
"""Beside the weight's own numbers, of a sum that is rounded to bfloat16."""


@frozen(kw_only=True)
class Variant:
    """A way to cut the products of some numbers of rows.

    parts: of the inputs, by shape
    """

    name: str
    tile: WordTile
    parts: tuple[int, int, int, int]
    rows: tuple[int, ...]
    formats: tuple[str, ...] = ("fp8", "int4", "mxfp4")

    def cut(self, shape: str) -> WordTile:
        """The tile for a shape."""
        parts = self.parts[NAMES.index(shape)]
        return evolve(self.tile, parts=parts, finish=self.tile.finish if parts > 1 else 0)


ADDED = WordTile(finish=2)
FEW, MANY, ALL = (1, 8), (16, 32, 64), ROWS
VARIANTS = (
    Variant(name="64", tile=ADDED, parts=(4, 8, 1, 8), rows=ALL),
    Variant(name="64 parts", tile=evolve(ADDED, finish=1), parts=(4, 8, 1, 8), rows=ALL),
    Variant(name="64 half the parts", tile=ADDED, parts=(2, 4, 1, 4), rows=ALL),
    Variant(name="64 pdl", tile=evolve(ADDED, pdl=True), parts=(4, 8, 1, 8), rows=FEW),
    Variant(
        name="64 pdl prefetch",
        tile=evolve(ADDED, pdl=True, prefetch=True),
        parts=(4, 8, 1, 8),
        rows=FEW,
    ),
    Variant(name="64 prefetch", tile=evolve(ADDED, prefetch=True), parts=(4, 8, 1, 8), rows=FEW),
    Variant(name="64 stages 2", tile=evolve(ADDED, stages=2), parts=(4, 8, 1, 8), rows=(8, *MANY)),
    Variant(name="32", tile=evolve(ADDED, rows=32, warps=2), parts=(4, 4, 1, 4), rows=(1, 8, 16)),
    Variant(name="16", tile=evolve(ADDED, rows=16, warps=1), parts=(2, 4, 1, 4), rows=FEW),
    Variant(
        name="128", tile=evolve(ADDED, rows=128, warps=8, stages=3), parts=(4, 4, 1, 4), rows=MANY
    ),
    Variant(
        name="128 halves",
        tile=evolve(ADDED, rows=128, warps=8, stages=3),
        parts=(8, 8, 2, 8),
        rows=(32, 64),
    ),
    Variant(
        name="128 narrow",
        tile=evolve(ADDED, j=16, rows=128, warps=8, stages=4),
        parts=(4, 8, 2, 8),
        rows=(32, 64),
        formats=("int4", "mxfp4"),
    ),
)
"""In parts so that three to six programs of each processor read at a time."""


@triton.jit(do_not_specialize=("tokens",))
def rows_by_rows_kernel(
    x, x_scales, weight, factors, out, tokens, outs, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr, PARTS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Parts of a product of two maps in FP8, the weight's rows first."""
    r, token, k = tl.arange(0, ROWS), tl.arange(0, TOKENS), tl.arange(0, DEPTH)
    row, part = tl.program_id(0) * ROWS + r, tl.program_id(1)
    inside = token < tokens
    first = part * (WIDTH // PARTS) + k[None, :]
    sums = tl.zeros((ROWS, TOKENS), tl.float32)
    for start in tl.range(0, WIDTH // PARTS, DEPTH, num_stages=STAGES):
        w = tl.load(weight + row.to(tl.int64)[:, None] * WIDTH + first + start)
        value = tl.load(x + token[:, None] * WIDTH + first + start, inside[:, None], other=0.0)
        sums = tl.dot(w, value.T, sums)
    sums *= tl.load(factors + row)[:, None]
    sums *= tl.load(x_scales + token, inside, other=0.0)[None, :]
    place = out + (part * tokens + token[None, :]) * outs + row[:, None]
    tl.store(place, sums, tl.broadcast_to(inside[None, :], (ROWS, TOKENS)))


def make_rows_by_rows(weight: torch.Tensor, copies: int, parts: int) -> list[Product]:
    """Rows that were quantized before by rows in FP8; the parts are left."""
    codes, _, factors = quant_packing.quantize_fp8(weight)
    outs, width = weight.shape
    given: dict[int, Fp8Rows] = {}

    def make(each: torch.Tensor) -> Product:
        def multiply(x: torch.Tensor) -> torch.Tensor:
            if x.data_ptr() not in given:
                given.clear()
                given[x.data_ptr()] = quantize_rows(x)
            rows = given[x.data_ptr()]
            out = x.new_empty(parts, len(x), outs, dtype=torch.float32)
            rows_by_rows_kernel[(outs // 64, parts)](
                rows.values, rows.scales, each, factors, out, len(x), outs, WIDTH=width, ROWS=64,
                TOKENS=max(16, triton.next_power_of_2(len(x))), PARTS=parts, DEPTH=128, STAGES=4,
            )  # fmt: skip
            return out

        return multiply

    return [make(codes.view(torch.float8_e4m3fn).clone()) for _ in range(copies)]


def make_words(
    format: str, weight: torch.Tensor, copies: int, tile: WordTile, counters: torch.Tensor
) -> list[Product]:
    """Products of copies of a weight in words."""
    ready = prepare(format, weight, tile.j, tile.rows)

    def make(words: torch.Tensor) -> Product:
        each = evolve(ready, words=words)
        return lambda x: multiply_words(x, each, tile, counters)

    return [make(ready.words.clone()) for _ in range(copies)]


def compile_variant(work: tuple[str, str, str, int]) -> str:
    """Compile a variant for a format, a shape and a number of rows; returns an error or ""."""
    name, format, shape, rows = work
    variant = next(each for each in VARIANTS if each.name == name)
    try:
        compile_words(format, *SHAPES[shape], rows, variant.cut(shape))
    except Exception as error:
        return f"{work}: {error!r}"[:300]
    return ""


def list_kernels(wanted: str) -> list[tuple[str, str, str, int]]:
    """The variants, formats, shapes and rows that need a kernel each."""
    return [
        (each.name, format, shape, rows)
        for each in VARIANTS
        for format in each.formats
        for shape in NAMES
        for rows in sorted({count_tokens(rows, each.tile) for rows in each.rows}, reverse=True)
        if re.search(wanted, f"{format} {each.name}")
    ]


def measure(
    products: list[Product], weight: torch.Tensor, rows: int, *, parts: bool
) -> Mapping[str, object]:
    """A product's error, whether its bits are the same, and its time.   weight: float32"""
    generator = torch.Generator("cuda").manual_seed(rows)
    x = torch.randn(rows, weight.shape[1], generator=generator, device="cuda").to(torch.bfloat16)
    try:

        def multiply(x: torch.Tensor) -> torch.Tensor:
            return products[0](x).sum(0) if parts else products[0](x)

        whole, exact = multiply(x), x.float() @ weight.t()
        error = float((whole.float() - exact).norm() / exact.norm())
        line = {"error": round(error, 6), "is_right": error < MOST_ERROR}
        return (
            line | describe_rows(multiply, x, whole) | {"us": round(time_products(products, x), 2)}
        )
    except Exception as error:
        return {"failed": repr(error)[:300]}


def list_makers(
    format: str, shape: str, weight: torch.Tensor, copies: int
) -> Iterator[tuple[str, tuple[int, ...], bool, Callable[[], list[Product]]]]:
    """Names, numbers of rows, whether parts are left, and what makes the products."""
    yield "now", ROWS, False, partial(make_now, format, weight, copies)
    if format == "fp8":
        for count in (2, 4, 8):
            if len(weight) // 64 * count < 1000:
                make = partial(make_rows_by_rows, weight, copies, count)
                yield f"rows by rows, {count} parts", (8, *MANY), True, make
    counters = torch.zeros(4096, dtype=torch.int32, device="cuda")
    for each in VARIANTS:
        if format in each.formats:
            tile = each.cut(shape)
            make = partial(make_words, format, weight, copies, tile, counters)
            yield each.name, each.rows, tile.finish == 1, make


def run_contest(seconds: float, wanted: str) -> Iterator[dict[str, object]]:
    """Every variant whose format and name match, until the time is over."""
    end = time.monotonic() + seconds
    generator = torch.Generator("cuda").manual_seed(0)
    for shape in NAMES:
        outs, width = SHAPES[shape]
        weight = torch.randn(outs, width, generator=generator, device="cuda") / width**0.5
        weight = weight.to(torch.bfloat16)
        for format in ("bf16", *BITS):
            copies = max(2, -(-CACHE_BYTES * 8 // (outs * width * BITS.get(format, 16))))
            plain = weight.float() if format == "bf16" else quant_packing.dequantize(format, weight)
            for name, row_counts, parts, make in list_makers(format, shape, weight, copies):
                if not re.search(wanted, f"{format} {name}"):
                    continue
                products = make()
                for rows in row_counts:
                    if time.monotonic() > end:
                        return
                    line = {"format": format, "variant": name, "shape": shape, "rows": rows}
                    yield {**line, **measure(products, plain, rows, parts=parts)}
                del products
            torch.cuda.empty_cache()


def make_now(format: str, weight: torch.Tensor, copies: int) -> list[Product]:
    """What the operations do today."""
    if format == "bf16":
        return make_bf16(weight, copies)
    return make_packed(weight, copies, format=NOW[format])


def check_variants() -> None:
    """Each tile on a small weight, in the interpreter."""
    torch.manual_seed(0)
    counters = torch.zeros(64, dtype=torch.int32)
    for each in VARIANTS:
        for format in each.formats:
            for shape in NAMES:
                tile = each.cut(shape)
                unit = (4 if format == "fp8" else 8) * tile.j
                weight = torch.randn(2 * tile.rows, unit * tile.parts * 2) / 30
                x = torch.randn(each.rows[-1] - 3 * (each.rows[-1] > 8), weight.shape[1])
                x = x.to(torch.bfloat16)
                ready = prepare(format, weight, tile.j, tile.rows)
                whole = multiply_words(x, ready, tile, counters)
                whole = whole.sum(0) if tile.finish == 1 else whole
                exact = x.float() @ quant_packing.dequantize(format, weight).t()
                error = float((whole.float() - exact).norm() / exact.norm())
                assert error < MOST_ERROR, (each.name, format, shape, error)
                assert not counters.any(), "a counter was not set back"
        sys.stdout.write(f"{each.name}: right\n")


if __name__ == "__main__":
    if sys.argv[1] == "check":
        check_variants()
        raise SystemExit
    began = time.monotonic()
    seconds, wanted = (*sys.argv[2:], *("220", "")[len(sys.argv) - 2 :])
    with Path(sys.argv[1]).open("w", buffering=1) as file:

        def report(line: dict[str, object]) -> None:
            print(json.dumps(line), file=file)
            sys.stdout.write(f"{json.dumps(line)}\n")

        pool = ProcessPoolExecutor(
            min(16, os.cpu_count() or 1), mp_context=multiprocessing.get_context("spawn")
        )
        with pool:
            for error in pool.map(compile_variant, list_kernels(wanted), chunksize=4):
                if error:
                    report({"not_compiled": error})
        report(
            {
                "device": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "triton": triton.__version__,
                "compiled_s": round(time.monotonic() - began, 1),
            }
        )
        left = float(seconds) - (time.monotonic() - began)
        for found in run_contest(left, wanted):
            report(found)
        report({"took_s": round(time.monotonic() - began, 1)})
