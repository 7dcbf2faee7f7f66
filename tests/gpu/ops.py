"""The operations `triton` beside torch's on the GPU: right in every shape of the shipped models, and how fast."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import ops_cases as cases
import torch
from attrs import evolve
from ops_cases import SETTINGS, Shape

from headstock.nn import sampling as torch_sampling
from headstock.nn.kv import kv_cells
from headstock.nn.noise import gumbel
from headstock.nn.rope import Turns
from headstock.nn.torch_ops import TorchOps
from headstock.spi import Weight
from headstock_triton import activation, linear, norm, sampling
from headstock_triton.heads import turn_and_store

DEVICE = "cuda"
VOCAB = 151_936
SHAPES = {
    "demo": Shape(hidden=256, heads=4, kv_heads=2, head_dim=64, intermediate=704, vocab=768),
    "0.6B": Shape(hidden=1024, heads=16, kv_heads=8, head_dim=128, intermediate=3072, vocab=VOCAB),
    "8B": Shape(hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=12_288, vocab=VOCAB),
}
TOKENS = (1, 7, 256, 2048)
TYPES = (torch.bfloat16, torch.float16, torch.float32)
TIMED_TOKENS = (1, 16, 64, 256, 8192)
TIMED_ROWS = (1, 64, 256)
LINEAR_TOKENS = (1, 2, 4, 8, 16)
COPIES = 8
"""Inputs that take turns when a kernel is timed, so that large ones come from memory."""


def main(builds: list[object]) -> dict[str, Any]:
    """Right or wrong case by case, then microseconds of each kernel and of torch's operations for the same."""
    failed: dict[str, str] = {}
    worst: dict[str, float] = {}

    def attempt(name: str, work: Callable[[], Any]) -> Any:
        try:
            found = work()
            torch.cuda.synchronize()
        except Exception as problem:
            failed[name] = f"{type(problem).__name__}: {' '.join(str(problem).split())[:400]}"
            return None
        if isinstance(found, float):
            kind = name.split(",")[0]
            worst[kind] = max(worst.get(kind, 0.0), found)
        return found

    for name, work in right_cases().items():
        attempt(name, work)
    microseconds = {name: attempt(f"time {name}", work) for name, work in timed_cases().items()}
    return {
        "ok": not failed,
        "failed": failed,
        "worst": worst,
        "microseconds": microseconds,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }


def right_cases() -> dict[str, Callable[[], Any]]:
    """Name -> work that raises unless a kernel agrees with torch. Names begin with their kind."""
    found: dict[str, Callable[[], Any]] = {"noise": noise_case}

    def put(name: str, function: Callable[..., Any], *arguments: Any, **more: Any) -> None:
        found[name] = lambda: function(*arguments, **more)

    for label, shape in SHAPES.items():
        for dtype in TYPES:
            for tokens in TOKENS:
                case = f"{label}, {tokens} tokens, {dtype}"
                for pending in (False, True):
                    put(f"norm, {case}, {pending}", cases.norm_case, tokens, shape.hidden, dtype, DEVICE, pending)
                put(f"embed, {case}", cases.embed_case, tokens, shape.hidden, dtype, DEVICE)
                put(f"activation, {case}", cases.activation_case, tokens, shape.intermediate, dtype, DEVICE)
                put(f"heads, {case}", cases.heads_case, shape, tokens, dtype, DEVICE, page_size=64)
            put(f"model, {label}, {dtype}", cases.model_case, evolve(shape, vocab=1000), 256, dtype, DEVICE)
        for pool_dtype in (torch.float8_e4m3fn,):
            eight = {"page_size": 64, "pool_dtype": pool_dtype}
            put(f"heads 8-bit, {label}", cases.heads_case, shape, 256, torch.bfloat16, DEVICE, **eight)
    for head_dim in (64, 80, 96, 256):
        for change in ({}, {"qk_norm": False}, {"rope_dim": head_dim // 2}):
            shape = evolve(SHAPES["0.6B"], head_dim=head_dim, **change)
            for tokens in (7, 256):
                put(f"heads, {head_dim}, {change}, {tokens}", cases.heads_case, shape, tokens, torch.bfloat16, DEVICE)
    for name, settings in SETTINGS.items():
        for rows in (1, 7, 64):
            for dtype in (torch.bfloat16, torch.float32):
                case = f"{name}, {rows} rows, {dtype}"
                put(f"sampling, {case}", cases.sampling_case, rows, VOCAB, dtype, DEVICE, settings)
                more = {"top_logprobs": 0}
                put(f"sampling, {case}, logprobs", cases.sampling_case, rows, VOCAB, dtype, DEVICE, settings, **more)
                if name not in ("greedy", "temperature"):
                    put(f"cut, {case}", cases.cut_case, rows, VOCAB, dtype, DEVICE, settings)
        put(f"sampling in a graph, {name}", sampling_in_a_graph, settings)
        if settings:
            put(f"distribution, {name}", distribution_case, settings)
    for label, (outs, width) in products().items():
        for tokens in LINEAR_TOKENS:
            for dtype in (torch.bfloat16, torch.float16):
                case = f"linear, {label}, {tokens} tokens, {dtype}"
                put(case, cases.linear_case, tokens, outs, width, dtype, DEVICE, tokens % 2 == 0)
    put("layers in a graph", layers_in_a_graph)
    return found


def noise_case() -> float:
    """Rows of equal logits: the tokens taken are those of torch's largest noise."""
    rows = 64
    seeds, positions = torch.arange(rows, device=DEVICE) * 77_777_777_777 - 3, torch.arange(rows, device=DEVICE)
    asked = cases.Sampling(temperature=torch.ones(rows, device=DEVICE), seeds=seeds, positions=positions)
    found = sampling.sample(torch.zeros(rows, VOCAB, dtype=torch.bfloat16, device=DEVICE), asked).tokens
    expected = gumbel(seeds, positions, VOCAB)
    short = expected.amax(-1) - expected.gather(1, found[:, None])[:, 0]
    assert float(short.max()) < 1e-5, f"noise of the tokens taken is short of the largest by up to {float(short.max())}"
    return float((found != expected.argmax(-1)).float().mean())


def distribution_case(settings: Mapping[str, Any]) -> None:
    """100,000 draws from 20 tokens of one row are spread as torch's probabilities are."""
    draws, vocab = 100_000, 20
    row = cases.noise(1, vocab, dtype=torch.bfloat16, device=DEVICE, scale=1.5)
    asked = cases.sampling_of(draws, DEVICE, dict(settings))
    asked.temperature[3] = asked.temperature[0]  # no greedy row
    counts = sampling.sample(row.repeat(draws, 1), asked).tokens.bincount(minlength=vocab).double()
    one = evolve(asked, **{name: getattr(asked, name)[:1] for name in settings})
    scores = cases.torch_cut((row.float() - row.float().amax()) / one.temperature[:, None], one)[0]
    expected = scores.double().softmax(-1) * draws
    likely = expected > 0
    assert float(counts[~likely].sum()) == 0, "tokens that are cut off were drawn"
    off = float(((counts - expected)[likely] ** 2 / expected[likely]).sum())
    assert off < 50, f"chi-square {off:.1f}; of 19 degrees of freedom one in ten thousand is above 50"


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


def sampling_in_a_graph(settings: Mapping[str, Any]) -> float:
    """A graph gives the tokens of new logits and new seeds."""
    rows = 16
    logits = cases.logits_of(rows, VOCAB, torch.bfloat16, DEVICE)
    asked = cases.sampling_of(rows, DEVICE, dict(settings))
    graph, found = replayed(lambda: sampling.sample(logits, asked))
    wrong = 0.0
    for seed in (5, 6):
        logits.copy_(cases.noise(rows, VOCAB, dtype=torch.bfloat16, device=DEVICE, seed=seed, scale=4.0))
        if asked.seeds is not None:
            asked.seeds.add_(seed)
        graph.replay()
        expected = sampling.sample(logits, asked)
        assert torch.equal(found.tokens, expected.tokens) and torch.equal(found.healthy, expected.healthy)
        others = found.tokens != torch_sampling.sample(logits.float(), asked).tokens
        wrong = max(wrong, float(others.float().mean()))
    assert wrong < 0.1, f"{wrong} of the rows have other tokens than torch's"
    return wrong


def layers_in_a_graph() -> float:
    """A graph of two layers gives what a call outside gives, for other tokens, positions and slots."""
    shape = evolve(SHAPES["0.6B"], vocab=1000)
    config = cases.config_of(shape)
    params = cases.params_of(config, torch.bfloat16, DEVICE)
    batch = cases.batch_of(config, 64, torch.bfloat16, DEVICE)
    ops = cases.TritonOps()
    with torch.inference_mode():
        graph, found = replayed(lambda: cases.forward(params, config, batch, lambda q, layer: q, ops))
        for change in (3, 11):
            batch.tokens.add_(change).remainder_(config.vocab)
            batch.positions.add_(change).remainder_(40_960)
            batch.slots[0].copy_(batch.slots[0].flip(0))
            graph.replay()
            pools = [pool.clone() for pool in batch.pools]
            expected = cases.forward(params, config, batch, lambda q, layer: q, ops)
            assert torch.equal(found, expected)
            assert all(torch.equal(*pair) for pair in zip(pools, batch.pools, strict=True))
    return 0.0


def timed_cases() -> dict[str, Callable[[], dict[str, Any]]]:
    """Name -> work that gives microseconds by kernel."""
    found: dict[str, Callable[[], dict[str, Any]]] = {}
    for label in ("0.6B", "8B"):
        for tokens in TIMED_TOKENS:
            found[f"{label}, {tokens} tokens"] = lambda label=label, tokens=tokens: layer_times(SHAPES[label], tokens)
    for label, (outs, width) in products().items():
        found[f"linear, {label}"] = lambda outs=outs, width=width: linear_times(outs, width)
    for rows in TIMED_ROWS:
        for name in ("greedy", "temperature", "top_k", "top_p", "all"):
            found[f"sampling, {rows} rows, {name}"] = lambda rows=rows, name=name: sampling_times(rows, SETTINGS[name])
    return found


def layer_times(shape: Shape, tokens: int) -> dict[str, Any]:
    """Microseconds of a layer's kernels, of torch's operations for the same, and GB/s of what must be moved."""
    dtype, ops, both = torch.bfloat16, TorchOps(), shape.heads + shape.kv_heads
    page_size = 64
    slots, pages = cases.places(tokens, page_size, DEVICE)
    positions = cases.positions_of(tokens, DEVICE)
    table = torch.rand(40_960, 2, shape.head_dim // 2, device=DEVICE)
    pool = torch.zeros(pages, 2, page_size, shape.kv_heads, shape.head_dim, dtype=dtype, device=DEVICE)
    copies = COPIES if tokens > 1000 else 1

    def many(*dims: int) -> list[torch.Tensor]:
        return [cases.noise(*dims, dtype=dtype, device=DEVICE, seed=seed) for seed in range(copies)]

    totals, terms = many(tokens, shape.hidden), many(tokens, shape.hidden)
    weight = Weight(tensor=cases.noise(shape.hidden, dtype=dtype, device=DEVICE))
    head_weight = Weight(tensor=cases.noise(both, shape.head_dim, dtype=dtype, device=DEVICE))
    qkvs = many(tokens, (both + shape.kv_heads) * shape.head_dim)
    gates = many(tokens, 2 * shape.intermediate)
    turns, cells = Turns.at(table, positions, dtype), kv_cells(slots, page_size)

    def torch_norm(i: int) -> object:
        totals[i].add_(terms[i])
        return ops.rms_norm(totals[i], weight, cases.EPS)

    def torch_heads(i: int) -> None:
        view = qkvs[i].view(tokens, both + shape.kv_heads, shape.head_dim)
        qk = view[:, :both]
        ops.rotate_(ops.head_norm(qk, head_weight, cases.EPS), turns, qk)
        ops.store_kv_(pool, cells, view[:, shape.heads :].view(tokens, 2, shape.kv_heads, shape.head_dim))

    def heads(i: int) -> object:
        tensors = (qkvs[i], head_weight.tensor, table, positions, slots, pool)
        return turn_and_store(*tensors, heads=shape.heads, eps=cases.EPS)

    works: dict[str, tuple[Callable[[int], object], float]] = {
        "norm": (lambda i: norm.add_norm(totals[i], terms[i], weight.tensor, cases.EPS), 4 * totals[0].numel()),
        "norm, torch": (torch_norm, 4 * totals[0].numel()),
        "heads": (heads, 2 * qkvs[0].numel()),
        "heads, torch": (torch_heads, 2 * qkvs[0].numel()),
        "activation": (lambda i: activation.silu_and_mul(gates[i]), 1.5 * gates[0].numel()),
        "activation, torch": (lambda i: ops.silu_and_mul(gates[i]), 1.5 * gates[0].numel()),
    }
    return {name: speed(graph_us(work, copies), 2 * numbers) for name, (work, numbers) in works.items()}


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


def linear_times(outs: int, width: int) -> dict[str, Any]:
    """Microseconds of a product by this plugin's kernels and by torch, and GB/s of the weight.

    As many weights take turns as fill the device's cache several times over.
    """
    copies = max(2, 200_000_000 // (2 * outs * width))
    weights = [cases.noise(outs, width, dtype=torch.bfloat16, device=DEVICE, seed=seed) for seed in range(copies)]
    found = {}
    for tokens in LINEAR_TOKENS:
        x = cases.noise(tokens, width, dtype=torch.bfloat16, device=DEVICE)
        ours = graph_us(lambda i, x=x: linear.small_linear(x, weights[i], None), copies, launches=64)
        theirs = graph_us(lambda i, x=x: torch.nn.functional.linear(x, weights[i]), copies, launches=64)
        found[f"{tokens} tokens"] = speed(ours, 2 * outs * width)
        found[f"{tokens} tokens, torch"] = speed(theirs, 2 * outs * width)
    return found


def sampling_times(rows: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Microseconds from 16-bit logits to tokens: flat random ones, and ones as peaked as a trained model's."""
    asked = cases.sampling_of(rows, DEVICE, dict(settings))
    flat = cases.noise(rows, VOCAB, dtype=torch.bfloat16, device=DEVICE, scale=1.0)
    peaked = cases.noise(rows, VOCAB, dtype=torch.bfloat16, device=DEVICE, scale=2.5)
    peaked[:, :50] += torch.linspace(18, 8, 50, device=DEVICE).to(torch.bfloat16)
    found = {}
    for label, logits in (("flat", flat), ("peaked", peaked)):
        found[label] = speed(graph_us(lambda i, logits=logits: sampling.sample(logits, asked), 1), 2 * logits.numel())
    found["torch, flat"] = speed(device_us(lambda i: torch_sampling.sample(flat.float(), asked)), 2 * flat.numel())
    return found


def speed(microseconds: float, size: float) -> dict[str, float]:
    """The time, and the bytes that must be moved in it."""
    return {"us": round(microseconds, 2), "gb_s": round(size / microseconds / 1e3, 1)}


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
