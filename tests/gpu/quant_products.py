"""Contest products of quantized weights by shape: what a decode step's linear layers would cost.

    python tests/gpu/quant_products.py OUT.jsonl [SECONDS [PATTERN]]

Weights are random and lie in more copies than the L2 cache holds; a call is timed inside a CUDA
graph over all copies. Each line has a kernel, a shape, the median of its times in microseconds, its
error beside the float32 product, and whether a row's bits are the same alone, in a batch of equal
kernel choice and in a second run. The libraries are found on PYTHONPATH; what is missing is left
out by name.
"""

from __future__ import annotations

import copy
import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from attrs import evolve, frozen

from headstock.spi import WeightFormat, WeightKind
from headstock.weights import quantize
from headstock_conformance.ops.packed import pack_blocks
from headstock_triton import fp8_rows, packed

SHAPES = {  # out, in
    "8b.qkv": (6144, 4096),
    "8b.o": (4096, 4096),
    "8b.gate_up": (24576, 4096),
    "8b.down": (4096, 12288),
    "0.6b.qkv": (4096, 1024),
    "0.6b.gate_up": (6144, 1024),
    "0.6b.down": (1024, 3072),
}
ROWS = (1, 8, 32, 64, 256, 4096)
FEW_ROWS = (1, 8, 32, 64)
CACHE_BYTES = 150_000_000
"""Weights of at least so many bytes are read before one is read again."""
GROUP = 128

Product = Callable[[torch.Tensor], torch.Tensor]


@frozen
class Contestant:
    """A kernel: from a weight `[out, in]` to products of it, one for each copy.

    rows: the batch sizes that it is meant for
    """

    name: str
    bits: int
    rows: tuple[int, ...]
    make: Callable[[torch.Tensor, int], list[Product]]


def make_bf16(weight: torch.Tensor, copies: int) -> list[Product]:
    """cuBLAS, what quantized products must beat."""

    def make(each: torch.Tensor) -> Product:
        return lambda x: torch.nn.functional.linear(x, each)

    return [make(weight.clone()) for _ in range(copies)]


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 values and a scale `[rows, 1]` for each row."""
    scale = x.abs().amax(1, keepdim=True).float().clamp(min=1e-6) / 448
    return (x / scale).to(torch.float8_e4m3fn), scale


def make_fp8_rows(weight: torch.Tensor, copies: int, *, quantizes: bool) -> list[Product]:
    """torch's scaled product: a scale a token by a scale a channel."""
    values, scale = quantize_rows(weight)
    given: dict[str, Any] = {}

    def make(each: torch.Tensor) -> Product:
        def multiply(x: torch.Tensor) -> torch.Tensor:
            if quantizes:
                row_values, row_scale = quantize_rows(x)
            else:
                if given.get("of") is not x:
                    given.update(of=x, quantized=quantize_rows(x))
                row_values, row_scale = given["quantized"]
            return torch._scaled_mm(
                row_values, each.t(), row_scale, scale.t(), out_dtype=torch.bfloat16
            )

        return multiply

    return [make(values.clone()) for _ in range(copies)]


def make_packed(
    weight: torch.Tensor, copies: int, *, format: WeightFormat, quantizes: bool = True
) -> list[Product]:
    """The products of the operations `triton`.

    quantizes: whether rows are quantized in each call, as before a product that is not fused
    """
    is_block = format.kind is WeightKind.FP4_E2M1 or (format.group or (1, 1))[0] > 1
    if format.group is None:
        format = evolve(format, group=(1, weight.shape[1]))
    stored = (pack_blocks if is_block else quantize)(weight, format)
    given: dict[str, Any] = {}

    def make(tensor: torch.Tensor) -> Product:
        ready = packed.prepare_map(evolve(stored, tensor=tensor), weight.dtype)

        def multiply(x: torch.Tensor) -> torch.Tensor:
            if quantizes or not packed.is_quantized(x, ready):
                return packed.multiply_packed(x, ready)
            if given.get("of") is not x:
                rows = fp8_rows.quantize_rows(x, packed.choose_form(x, ready))
                given.update(of=x, quantized=rows)
            return packed.multiply_quantized(given["quantized"], ready)

        return multiply

    return [make(stored.tensor.clone()) for _ in range(copies)]


def ours(
    name: str, bits: int, kind: WeightKind, group: tuple[int, int] | None, **more: Any
) -> Contestant:
    """A contestant of the operations `triton`."""
    quantizes = more.pop("quantizes", True)
    format = WeightFormat(kind=kind, group=group, **more)
    return Contestant(
        f"{name} ours",
        bits,
        ROWS,
        lambda w, n: make_packed(w, n, format=format, quantizes=quantizes),
    )


def make_deep_gemm(weight: torch.Tensor, copies: int) -> list[Product]:
    """DeepGEMM: a scale a token and 128 inputs by a scale a block of 128 x 128."""
    import deep_gemm
    from deep_gemm.utils.math import per_block_cast_to_fp8, per_token_cast_to_fp8

    values, scale = per_block_cast_to_fp8(weight, use_ue8m0=False)
    given: dict[str, Any] = {}

    def make(each: torch.Tensor) -> Product:
        def multiply(x: torch.Tensor) -> torch.Tensor:
            if given.get("of") is not x:
                given.update(of=x, quantized=per_token_cast_to_fp8(x, use_ue8m0=False))
            out = torch.empty(x.shape[0], each.shape[0], dtype=torch.bfloat16, device=x.device)
            deep_gemm.fp8_gemm_nt(given["quantized"], (each, scale), out)
            return out

        return multiply

    return [make(values.clone()) for _ in range(copies)]


def make_humming(
    weight: torch.Tensor, copies: int, *, config: dict[str, object], is_invariant: bool
) -> list[Product]:
    """humming: a kernel compiled for the layer; with `is_invariant` it has no stream-k."""
    from humming.layer import HummingLayer, HummingLayerMethod

    out_features, in_features = weight.shape
    layer = HummingLayer(
        shape_n=out_features,
        shape_k=in_features,
        weight_config=dict(config),
        torch_dtype=torch.bfloat16,
    ).cuda()
    layer.load_from_unquantized(weight)
    layer.transform()
    compute = {"use_batch_invariant": is_invariant, "gemm_type": "dense"}

    def make(each: torch.nn.Module) -> Product:
        return lambda x: HummingLayerMethod.forward_layer(each, x, compute_config=compute)

    return [make(copy.deepcopy(layer)) for _ in range(copies)]


def make_humming_slices(weight: torch.Tensor, copies: int, *, slices: int) -> list[Product]:
    """humming's grouped product of slices of the inputs, added in their order: no atomics."""
    from humming.layer import HummingLayer, HummingLayerMethod

    features, inputs = weight.shape
    width = inputs // slices
    layer = HummingLayer(
        shape_n=features,
        shape_k=width,
        num_experts=slices,
        weight_config=dict(INT4),
        torch_dtype=torch.bfloat16,
    ).cuda()
    layer.load_from_unquantized(weight.view(features, slices, width).transpose(0, 1).contiguous())
    layer.transform()
    compute = {"use_batch_invariant": True, "gemm_type": "grouped_contiguous"}
    starts = torch.arange(slices + 1, device="cuda")

    def make(each: torch.nn.Module) -> Product:
        def multiply(x: torch.Tensor) -> torch.Tensor:
            rows = x.shape[0]
            sliced = x.view(rows, slices, width).transpose(0, 1).reshape(slices * rows, width)
            parts = HummingLayerMethod.forward_layer(
                each, sliced, expert_layout=starts * rows, compute_config=compute
            )
            return parts.view(slices, rows, features).sum(0, dtype=torch.float32).bfloat16()

        return multiply

    return [make(copy.deepcopy(layer)) for _ in range(copies)]


def quantize_int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Asymmetric INT4 by groups of 128 inputs: values, scales and zeros, `[out, groups, ...]`."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scale = ((high - low) / 15).clamp(min=1e-6).to(torch.bfloat16)
    zero = (-low / scale.float()).round().clamp(0, 15)
    values = (groups / scale.float()[..., None] + zero[..., None]).round().clamp(0, 15)
    return values.to(torch.uint8), scale, zero.to(torch.bfloat16)


def make_gemlite(weight: torch.Tensor, copies: int) -> list[Product]:
    """gemlite's Triton kernels, tuned at their first call."""
    from gemlite.helper import A16W4_HQQ_INT

    values, scale, zero = quantize_int4(weight)
    maker = A16W4_HQQ_INT(device="cuda:0", dtype=torch.bfloat16)
    products: list[Product] = []
    for _ in range(copies):
        arguments = (values.flatten(1).clone(), scale.reshape(-1, 1), zero.reshape(-1, 1))
        products.append(maker.from_weights_(*arguments, 4, GROUP))
    return products


@triton.jit
def int4_kernel(
    x, packed, scales, zeros, out, rows, features, inputs: tl.constexpr, splits: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """A part of the inputs of a tile of outputs; byte i of a group has its inputs i and i + 64."""
    tile, part = tl.program_id(0), tl.program_id(1)
    m, n = tl.arange(0, BM), tile * BN + tl.arange(0, BN)
    half = tl.arange(0, G // 2)
    groups: tl.constexpr = inputs // G
    total = tl.zeros((BM, BN), tl.float32)
    for number in range(groups // splits):
        group = part * (groups // splits) + number
        at = x + m[:, None] * inputs + group * G + half[None, :]
        low_x = tl.load(at, mask=m[:, None] < rows, other=0.0)
        high_x = tl.load(at + G // 2, mask=m[:, None] < rows, other=0.0)
        bytes_ = tl.load(packed + n[:, None] * (inputs // 2) + group * (G // 2) + half[None, :])
        zero = tl.load(zeros + n * groups + group).to(tl.float32)
        scale = tl.load(scales + n * groups + group).to(tl.float32)
        low = ((bytes_ & 15).to(tl.float32) - zero[:, None]).to(x.dtype.element_ty)
        high = ((bytes_ >> 4).to(tl.float32) - zero[:, None]).to(x.dtype.element_ty)
        products = tl.dot(low_x, tl.trans(low))
        products = tl.dot(high_x, tl.trans(high), products)
        total += products * scale[None, :]
    place = out + part * rows * features + m[:, None] * features + n[None, :]
    tl.store(place, total, mask=m[:, None] < rows)


def make_triton(
    weight: torch.Tensor, copies: int, *, tile: int, splits: int, warps: int = 4
) -> list[Product]:
    """A plain Triton kernel of our own: parts of the inputs, added in their order afterwards."""
    features, inputs = weight.shape
    values, scale, zero = quantize_int4(weight)
    packed = values[..., : GROUP // 2] | values[..., GROUP // 2 :] << 4

    def make(each: torch.Tensor) -> Product:
        def multiply(x: torch.Tensor) -> torch.Tensor:
            rows = x.shape[0]
            parts = torch.empty(splits, rows, features, dtype=torch.float32, device=x.device)
            int4_kernel[(features // tile, splits)](
                x, each, scale, zero, parts, rows, features, inputs, splits,
                max(16, triton.next_power_of_2(rows)), tile, GROUP, num_warps=warps, num_stages=4,
            )  # fmt: skip
            return parts.sum(0).to(torch.bfloat16)

        return multiply

    return [make(packed.clone()) for _ in range(copies)]


def humming(name: str, bits: int, config: dict[str, object], *, is_invariant: bool) -> Contestant:
    """A contestant of humming's."""

    def make(weight: torch.Tensor, copies: int) -> list[Product]:
        return make_humming(weight, copies, config=config, is_invariant=is_invariant)

    return Contestant(name, bits, ROWS, make)


INT4 = {"dtype": "uint4", "group_size": GROUP, "has_zero_point": True}
MXFP4 = {"dtype": "float4e2m1", "group_size": 32, "scale_dtype": "float8e8m0"}
FP8 = {"dtype": "float8e4m3"}

CONTESTANTS = (
    Contestant("bf16", 16, ROWS, make_bf16),
    Contestant("fp8 torch", 8, ROWS, lambda w, n: make_fp8_rows(w, n, quantizes=False)),
    Contestant("fp8 torch, quantizes", 8, ROWS, lambda w, n: make_fp8_rows(w, n, quantizes=True)),
    ours("fp8", 8, WeightKind.FP8_E4M3, None),
    ours("fp8, quantized by what comes before,", 8, WeightKind.FP8_E4M3, None, quantizes=False),
    ours("block fp8", 8, WeightKind.FP8_E4M3, (128, 128)),
    ours("int8", 8, WeightKind.INT8, None),
    ours("int4", 4, WeightKind.INT4, (1, GROUP), has_zeros=True),
    ours("mxfp4", 4, WeightKind.FP4_E2M1, (1, 32)),
    Contestant("fp8 deep-gemm", 8, ROWS, make_deep_gemm),
    humming("int4 humming", 4, INT4, is_invariant=True),
    humming("int4 humming, stream-k", 4, INT4, is_invariant=False),
    humming("mxfp4 humming", 4, MXFP4, is_invariant=True),
    humming("fp8 weights humming", 8, FP8, is_invariant=True),
    *(
        Contestant(
            f"int4 humming, {slices} slices",
            4,
            FEW_ROWS,
            lambda w, n, slices=slices: make_humming_slices(w, n, slices=slices),
        )
        for slices in (4, 8)
    ),
    *(
        Contestant(
            f"int4 triton {tile}/{splits}/{warps}",
            4,
            FEW_ROWS,
            lambda w, n, tile=tile, splits=splits, warps=warps: make_triton(
                w, n, tile=tile, splits=splits, warps=warps
            ),
        )
        for tile, splits, warps in ((16, 8, 2), (32, 8, 2), (32, 4, 1), (64, 8, 4), (128, 8, 8))
    ),
    Contestant("int4 gemlite", 4, (1, 8, 64), make_gemlite),
)


def time_products(products: list[Product], x: torch.Tensor) -> float:
    """Microseconds of one product: the median of 15 replays over all copies."""
    for product in products[:2]:
        product(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for product in products:
            product(x)
    times = []
    for _ in range(15):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(products))
    return statistics.median(times)


def describe_rows(product: Product, x: torch.Tensor, whole: torch.Tensor) -> dict[str, bool]:
    """Whether bits depend on the run, on the row's place, or on the rows beside it."""
    again = all(torch.equal(product(x), whole) for _ in range(8))
    turned = torch.equal(product(x.flip(0).contiguous()).flip(0), whole)
    alone = torch.equal(product(x[:1].contiguous())[0], whole[0])
    return {"same_again": again, "same_in_other_places": turned, "same_alone": alone}


def run_contest(seconds: float, wanted: str) -> Iterator[dict[str, object]]:
    """Every contestant whose name matches `wanted`, on every shape, until the time is over."""
    end = time.monotonic() + seconds
    generator = torch.Generator("cuda").manual_seed(0)
    for contestant in CONTESTANTS:
        if not re.search(wanted, contestant.name):
            continue
        for shape, (features, inputs) in SHAPES.items():
            if contestant.name == "int4 gemlite" and shape not in ("8b.gate_up", "0.6b.qkv"):
                continue  # its tuning takes a minute a shape
            if time.monotonic() > end:
                return
            weight = torch.randn(features, inputs, generator=generator, device="cuda") / inputs**0.5
            weight = weight.to(torch.bfloat16)
            copies = max(2, -(-CACHE_BYTES * 8 // (features * inputs * contestant.bits)))
            began = time.monotonic()
            try:
                products = contestant.make(weight, copies)
            except Exception as error:
                yield {"kernel": contestant.name, "shape": shape, "error": repr(error)[:300]}
                continue
            for rows in contestant.rows:
                x = torch.randn(rows, inputs, generator=generator, device="cuda")
                x = x.to(torch.bfloat16)
                line: dict[str, object] = {"kernel": contestant.name, "shape": shape, "rows": rows}
                try:
                    whole = products[0](x)
                    exact = x.float() @ weight.float().t()
                    error = (whole.float() - exact).norm() / exact.norm()
                    line |= {"error": round(float(error), 5)}
                    line |= describe_rows(products[0], x, whole)
                    few = products if rows <= 256 else products[:4]
                    line |= {"us": round(time_products(few, x), 2)}
                except Exception as error:
                    line |= {"failed": repr(error)[:300]}
                yield line | {"took_s": round(time.monotonic() - began, 1)}
            del products
            torch.cuda.empty_cache()


if __name__ == "__main__":
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    with Path(sys.argv[1]).open("w", buffering=1) as file:
        head = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        print(json.dumps(head), file=file)
        seconds, wanted = (*sys.argv[2:], *("500", "")[len(sys.argv) - 2 :])
        for found in run_contest(float(seconds), wanted):
            print(json.dumps(found), file=file)
            sys.stdout.write(f"{json.dumps(found)}\n")
