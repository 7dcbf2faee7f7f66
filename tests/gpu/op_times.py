"""How long the kernels of `triton` take on the GPU, and torch's operations for the same."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import ops_cases as cases
import torch
from ops_cases import Shape
from sampling_cases import SETTINGS, sampling_of

from headstock.nn import sampler as torch_sampler
from headstock.nn.kv import kv_cells
from headstock.nn.rope import CosSin
from headstock.ops.torch_ops import TorchOps
from headstock.spi import Activation, Weight
from headstock_triton import activation, linear, norm
from headstock_triton.heads import rope_and_store_kv
from headstock_triton.sampling import sampler
from headstock_triton.sampling.truncation import cut_by_search, find_cut

DEVICE = "cuda"
VOCAB = 151_936
SHAPES = {
    "demo": Shape(hidden=256, heads=4, kv_heads=2, head_dim=64, intermediate=704, vocab=768),
    "0.6B": Shape(hidden=1024, heads=16, kv_heads=8, head_dim=128, intermediate=3072, vocab=VOCAB),
    "8B": Shape(hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=12_288, vocab=VOCAB),
}
TIMED_TOKENS = (1, 16, 64, 256, 8192)
TIMED_ROWS = (1, 64, 256)
CUT_ROWS = (1, 4, 8, 16, 32, 64)
LINEAR_TOKENS = (1, 2, 4, 8, 16)
COPIES = 8
"""Inputs that take turns when a kernel is timed, so that large ones come from memory."""


def products() -> dict[str, tuple[int, int]]:
    """Name -> outputs and inputs of the products of the timed models."""
    found = {}
    for label in ("0.6B", "8B"):
        shape = SHAPES[label]
        width = shape.heads * shape.head_dim
        found[f"{label} qkv"] = (width + 2 * shape.kv_heads * shape.head_dim, shape.hidden)
        found[f"{label} attn_out"] = (shape.hidden, width)
        found[f"{label} gate_up"] = (2 * shape.intermediate, shape.hidden)
        found[f"{label} down"] = (shape.hidden, shape.intermediate)
    return found


def timed_cases() -> dict[str, Callable[[], dict[str, Any]]]:
    """Name -> work that gives microseconds by kernel."""
    found: dict[str, Callable[[], dict[str, Any]]] = {}
    for label in ("0.6B", "8B"):
        for tokens in TIMED_TOKENS:
            found[f"{label}, {tokens} tokens"] = lambda label=label, tokens=tokens: layer_times(
                SHAPES[label], tokens
            )
    for label, (outs, width) in products().items():
        found[f"linear, {label}"] = lambda outs=outs, width=width: linear_times(outs, width)
    for rows in CUT_ROWS:
        found[f"cut, {rows} rows"] = lambda rows=rows: cut_times(rows)
    for rows in TIMED_ROWS:
        for name in ("greedy", "temperature", "top_k", "top_p", "all"):
            found[f"sampling, {rows} rows, {name}"] = lambda rows=rows, name=name: sampling_times(
                rows, SETTINGS[name]
            )
    return found


def layer_times(shape: Shape, tokens: int) -> dict[str, Any]:
    """Microseconds of a layer's kernels, of torch's operations for the same, and GB/s of what must
    be moved.
    """
    dtype, ops, both = torch.bfloat16, TorchOps(), shape.heads + shape.kv_heads
    page_size = 64
    slots, pages = cases.places(tokens, page_size, DEVICE)
    positions = cases.positions_of(tokens, DEVICE)
    table = torch.rand(40_960, 2, shape.head_dim // 2, device=DEVICE)
    pool = torch.zeros(
        pages, 2, page_size, shape.kv_heads, shape.head_dim, dtype=dtype, device=DEVICE
    )
    copies = COPIES if tokens > 1000 else 1

    def many(*dims: int) -> list[torch.Tensor]:
        return [cases.noise(*dims, dtype=dtype, device=DEVICE, seed=seed) for seed in range(copies)]

    totals, terms = many(tokens, shape.hidden), many(tokens, shape.hidden)
    weight = Weight(tensor=cases.noise(shape.hidden, dtype=dtype, device=DEVICE))
    head_weight = Weight(tensor=cases.noise(both, shape.head_dim, dtype=dtype, device=DEVICE))
    qkvs = many(tokens, (both + shape.kv_heads) * shape.head_dim)
    gates = many(tokens, 2 * shape.intermediate)
    turns, cells = CosSin.at_positions(table, positions, dtype), kv_cells(slots, page_size)

    def torch_norm(i: int) -> object:
        totals[i].add_(terms[i])
        return ops.rms_norm(totals[i], weight, cases.EPS)

    def torch_heads(i: int) -> None:
        view = qkvs[i].view(tokens, both + shape.kv_heads, shape.head_dim)
        qk = view[:, :both]
        ops.rotate_(ops.head_norm(qk, head_weight, cases.EPS), turns, qk)
        ops.store_kv_(
            pool, cells, view[:, shape.heads :].view(tokens, 2, shape.kv_heads, shape.head_dim)
        )

    def heads(i: int) -> object:
        tensors = (qkvs[i], head_weight.tensor, table, positions, slots, pool)
        return rope_and_store_kv(*tensors, heads=shape.heads, eps=cases.EPS)

    works: dict[str, tuple[Callable[[int], object], float]] = {
        "norm": (
            lambda i: norm.add_norm(totals[i], terms[i], weight.tensor, cases.EPS),
            4 * totals[0].numel(),
        ),
        "norm, torch": (torch_norm, 4 * totals[0].numel()),
        "heads": (heads, 2 * qkvs[0].numel()),
        "heads, torch": (torch_heads, 2 * qkvs[0].numel()),
        "activation": (lambda i: activation.fused_silu_and_mul(gates[i]), 1.5 * gates[0].numel()),
        "activation, torch": (
            lambda i: ops.activate_and_mul(gates[i], Activation.SILU),
            1.5 * gates[0].numel(),
        ),
    }
    return {
        name: speed(graph_us(work, copies), 2 * numbers) for name, (work, numbers) in works.items()
    }


def linear_times(outs: int, width: int) -> dict[str, Any]:
    """Microseconds of a product by this plugin's kernels and by torch, and GB/s of the weight.

    As many weights take turns as fill the device's cache several times over.
    """
    copies = max(2, 200_000_000 // (2 * outs * width))
    weights = [
        cases.noise(outs, width, dtype=torch.bfloat16, device=DEVICE, seed=seed)
        for seed in range(copies)
    ]
    found = {}
    for tokens in LINEAR_TOKENS:
        x = cases.noise(tokens, width, dtype=torch.bfloat16, device=DEVICE)
        if linear.can_add(tokens, width, x.device):
            ours = graph_us(
                lambda i, x=x: linear.small_linear(x, Weight(tensor=weights[i])),
                copies,
                launches=64,
            )
            found[f"{tokens} tokens"] = speed(ours, 2 * outs * width)
        theirs = graph_us(
            lambda i, x=x: torch.nn.functional.linear(x, weights[i]), copies, launches=64
        )
        found[f"{tokens} tokens, torch"] = speed(theirs, 2 * outs * width)
    return found


def cut_times(rows: int) -> dict[str, Any]:
    """Microseconds of both ways to cut rows off, for the number of rows from which a search is
    faster.
    """
    logits = cases.noise(rows, VOCAB, dtype=torch.bfloat16, device=DEVICE, scale=2.0)
    found = {}
    for name in ("top_k", "top_p", "all"):
        asked = sampling_of(rows, DEVICE, dict(SETTINGS[name]))
        for way in (cut_by_search, find_cut):
            taken = graph_us(lambda i, way=way, asked=asked: way(logits, asked), 1, launches=4)
            found[f"{name}, {way.__name__}"] = speed(taken, 2 * logits.numel())
    return found


def sampling_times(rows: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Microseconds from 16-bit logits to tokens: flat random ones, and ones as peaked as a trained
    model's.
    """
    asked = sampling_of(rows, DEVICE, dict(settings))
    flat = cases.noise(rows, VOCAB, dtype=torch.bfloat16, device=DEVICE, scale=1.0)
    peaked = cases.noise(rows, VOCAB, dtype=torch.bfloat16, device=DEVICE, scale=2.5)
    peaked[:, :50] += torch.linspace(18, 8, 50, device=DEVICE).to(torch.bfloat16)
    found = {}
    for label, logits in (("flat", flat), ("peaked", peaked)):
        found[label] = speed(
            graph_us(lambda i, logits=logits: sampler.fused_sample(logits, asked), 1),
            2 * logits.numel(),
        )
    found["torch, flat"] = speed(
        device_us(lambda i: torch_sampler.sample(flat.float(), asked)), 2 * flat.numel()
    )
    return found


def speed(microseconds: float, size: float) -> dict[str, float]:
    """The time, and the bytes that must be moved in it."""
    return {"us": round(microseconds, 2), "gb_s": round(size / microseconds / 1e3, 1)}


def replayed(work: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """The work captured, after it was run once on another stream, and what it returned then."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = work()
    return graph, found


def graph_us(work: Callable[[int], object], copies: int, launches: int = 32) -> float:
    """The median of what one launch takes inside a graph of many."""
    graph, _ = replayed(lambda: [work(index % copies) for index in range(launches)] and None)
    return median_us(graph.replay, 9) / launches


def device_us(work: Callable[[int], object]) -> float:
    """The median of what one call takes on the device; torch's sampling cannot be captured."""
    work(0)
    return median_us(lambda: work(0), 5)


def median_us(work: Callable[[], object], times: int) -> float:
    """Microseconds on the device, queued behind a sleep."""
    work()
    found = []
    for _ in range(times):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(2_000_000)
        start.record()
        work()
        stop.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(stop) * 1000)
    return statistics.median(found)
