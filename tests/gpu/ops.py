"""The operations `triton` beside torch's on the GPU: right in every shape of the shipped models,
and how fast.

With `GPU_SHARE`, as in `gpu.share`, no times are taken.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import ops_cases as cases
import sampling_cases
import torch
from attrs import evolve
from gpu.op_times import DEVICE, LINEAR_TOKENS, SHAPES, VOCAB, products, replayed, timed_cases
from gpu.share import take_share
from sampling_cases import SETTINGS

from headstock.nn import sampler as torch_sampler
from headstock.nn.decoder import forward
from headstock.nn.noise import gumbel
from headstock.spi import Sampling
from headstock_triton import few_linear, linear, split_linear
from headstock_triton.gated_linear import GatedTile
from headstock_triton.ops import TritonOps
from headstock_triton.sampling import sampler

TOKENS = (1, 7, 256, 2048)
TYPES = (torch.bfloat16, torch.float16, torch.float32)


def main(builds: list[object]) -> dict[str, Any]:
    """Right or wrong case by case, then microseconds of each kernel and of torch's operations for
    the same.
    """
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

    for name, work in take_share(list(right_cases().items())):
        attempt(name, work)
    timed = {} if "GPU_SHARE" in os.environ else timed_cases()
    microseconds = {name: attempt(f"time {name}", work) for name, work in timed.items()}
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
                    put(
                        f"norm, {case}, {pending}",
                        cases.norm_case,
                        tokens,
                        shape.hidden,
                        dtype,
                        DEVICE,
                        pending,
                    )
                put(f"embed, {case}", cases.embed_case, tokens, shape.hidden, dtype, DEVICE)
                put(
                    f"activation, {case}",
                    cases.activation_case,
                    tokens,
                    shape.intermediate,
                    dtype,
                    DEVICE,
                )
                put(f"heads, {case}", cases.heads_case, shape, tokens, dtype, DEVICE, page_size=64)
            put(
                f"model, {label}, {dtype}",
                cases.model_case,
                evolve(shape, vocab=1000),
                256,
                dtype,
                DEVICE,
            )
        for pool_dtype in (torch.float8_e4m3fn,):
            eight = {"page_size": 64, "pool_dtype": pool_dtype}
            put(
                f"heads 8-bit, {label}",
                cases.heads_case,
                shape,
                256,
                torch.bfloat16,
                DEVICE,
                **eight,
            )
    for head_dim in (64, 80, 96, 256):
        for change in ({}, {"qk_norm": False}, {"rope_dim": head_dim // 2}):
            shape = evolve(SHAPES["0.6B"], head_dim=head_dim, **change)
            for tokens in (7, 256):
                put(
                    f"heads, {head_dim}, {change}, {tokens}",
                    cases.heads_case,
                    shape,
                    tokens,
                    torch.bfloat16,
                    DEVICE,
                )
    for name, settings in SETTINGS.items():
        for rows in (1, 7, 8, 9, 64, 256):
            for dtype in (torch.bfloat16, torch.float32):
                case = f"{name}, {rows} rows, {dtype}"
                put(
                    f"sampling, {case}",
                    sampling_cases.sampling_case,
                    rows,
                    VOCAB,
                    dtype,
                    DEVICE,
                    settings,
                )
                more = {"top_logprobs": 0}
                put(
                    f"sampling, {case}, logprobs",
                    sampling_cases.sampling_case,
                    rows,
                    VOCAB,
                    dtype,
                    DEVICE,
                    settings,
                    **more,
                )
                if name not in ("greedy", "temperature"):
                    put(
                        f"cut, {case}",
                        sampling_cases.cut_case,
                        rows,
                        VOCAB,
                        dtype,
                        DEVICE,
                        settings,
                    )
        for rows in (4, 16):
            put(f"sampling in a graph, {name}, {rows} rows", sampling_in_a_graph, settings, rows)
        if settings:
            put(f"distribution, {name}", distribution_case, settings)
    for label, (outs, width) in products().items():
        for tokens in LINEAR_TOKENS:
            if not linear.can_add(tokens, width, torch.device(DEVICE)):
                continue
            for dtype in (torch.bfloat16, torch.float16):
                case = f"linear, {label}, {tokens} tokens, {dtype}"
                put(case, cases.linear_case, tokens, outs, width, dtype, DEVICE, tokens % 2 == 0)
        for tokens in (1, 3, 16):
            if not linear.can_fuse(tokens, width, torch.device(DEVICE)):
                continue
            for change in ({"normed": True, "gated": True}, {"added": True, "bias": True}):
                arguments = (tokens, outs // 2, width, torch.bfloat16, DEVICE)
                put(
                    f"linear, {label}, {tokens} tokens, {change}, overlapping",
                    cases.fused_linear_case,
                    *arguments,
                    pdl=True,
                    **change,
                )
    for label, (outs, width) in products().items():
        for tokens in (2, 8, 11):
            few = few_linear.is_few(torch.empty(tokens, width, dtype=torch.bfloat16), outs)
            for pdl in (False, True) if few else ():
                case, where = f"few, {label}, {tokens} tokens", (torch.bfloat16, DEVICE)
                put(case, cases.few_case, tokens, outs, width, *where, bias=pdl, pdl=pdl)
        for tokens in (17, 32, 50, 100):
            tile = split_linear.choose_split_tile(tokens, width, outs)
            gated = split_linear.choose_gated_tile(tokens, width, outs // 2)
            where = (torch.bfloat16, DEVICE)
            if tile is not None:
                case = f"split, {label}, {tokens} tokens"
                put(case, cases.split_case, tokens, outs, width, *where, tile)
            if gated is not None:
                case = f"gated, {label}, {tokens} tokens"
                put(case, cases.gated_case, tokens, outs // 2, width, *where, gated)
        for tokens in (1024, 3001):
            if outs % 256 == 0 and width % 64 == 0:
                case = f"gated, {label}, {tokens} tokens"
                put(case, cases.gated_case, tokens, outs // 2, width, *where, GatedTile())
                wide, sizes = GatedTile(group=16), (tokens, outs // 2, width)
                put(f"{case}, groups of 16", cases.gated_case, *sizes, *where, wide)
    for tokens in (1, 8, 32, 64, 100):
        put(f"layers in a graph, {tokens} tokens", layers_in_a_graph, tokens)
    return found


def noise_case() -> float:
    """Rows of equal logits: the tokens taken are those of torch's largest noise."""
    rows = 64
    seeds, positions = (
        torch.arange(rows, device=DEVICE) * 77_777_777_777 - 3,
        torch.arange(rows, device=DEVICE),
    )
    asked = Sampling(temperature=torch.ones(rows, device=DEVICE), seeds=seeds, positions=positions)
    found = sampler.fused_sample(
        torch.zeros(rows, VOCAB, dtype=torch.bfloat16, device=DEVICE), asked
    ).tokens
    expected = gumbel(seeds, positions, VOCAB)
    short = expected.amax(-1) - expected.gather(1, found[:, None])[:, 0]
    assert float(short.max()) < 1e-5, (
        f"noise of the tokens taken is short of the largest by up to {float(short.max())}"
    )
    return float((found != expected.argmax(-1)).float().mean())


def distribution_case(settings: Mapping[str, Any]) -> None:
    """100,000 draws from 20 tokens of one row are spread as torch's probabilities are."""
    draws, vocab = 100_000, 20
    row = cases.noise(1, vocab, dtype=torch.bfloat16, device=DEVICE, scale=1.5)
    asked = sampling_cases.sampling_of(draws, DEVICE, dict(settings))
    asked.temperature[3] = asked.temperature[0]  # no greedy row
    counts = (
        sampler.fused_sample(row.repeat(draws, 1), asked).tokens.bincount(minlength=vocab).double()
    )
    one = evolve(asked, **{name: getattr(asked, name)[:1] for name in settings})
    scores = sampling_cases.torch_cut(
        (row.float() - row.float().amax()) / one.temperature[:, None], one
    )[0]
    expected = scores.double().softmax(-1) * draws
    likely = expected > 0
    assert float(counts[~likely].sum()) == 0, "tokens that are cut off were drawn"
    off = float(((counts - expected)[likely] ** 2 / expected[likely]).sum())
    assert off < 50, (
        f"chi-square {off:.1f}; of 19 degrees of freedom one in ten thousand is above 50"
    )


def sampling_in_a_graph(settings: Mapping[str, Any], rows: int) -> float:
    """A graph gives the tokens of new logits and new seeds."""
    logits = sampling_cases.logits_of(rows, VOCAB, torch.bfloat16, DEVICE)
    asked = sampling_cases.sampling_of(rows, DEVICE, dict(settings))
    graph, found = replayed(lambda: sampler.fused_sample(logits, asked))
    wrong = 0.0
    for seed in (5, 6):
        logits.copy_(
            cases.noise(rows, VOCAB, dtype=torch.bfloat16, device=DEVICE, seed=seed, scale=4.0)
        )
        if asked.seeds is not None:
            asked.seeds.add_(seed)
        graph.replay()
        expected = sampler.fused_sample(logits, asked)
        assert torch.equal(found.tokens, expected.tokens) and torch.equal(
            found.healthy, expected.healthy
        )
        others = found.tokens != torch_sampler.sample(logits.float(), asked).tokens
        wrong = max(wrong, float(others.float().mean()))
    assert wrong < 0.1, f"{wrong} of the rows have other tokens than torch's"
    return wrong


def layers_in_a_graph(tokens: int) -> float:
    """A graph of two layers gives what a call outside gives, for other tokens, positions and
    slots.
    """
    shape = evolve(SHAPES["0.6B"], vocab=1000)
    config = cases.config_of(shape)
    params = cases.params_of(config, torch.bfloat16, DEVICE)
    batch = cases.batch_of(config, tokens, torch.bfloat16, DEVICE)
    ops = TritonOps()
    ops.bind(params, config)
    with torch.inference_mode():
        graph, found = replayed(lambda: forward(params, config, batch, lambda q, layer: q, ops))
        for change in (3, 11):
            batch.tokens.add_(change).remainder_(config.vocab)
            batch.positions.add_(change).remainder_(40_960)
            batch.slots[0].copy_(batch.slots[0].flip(0))
            graph.replay()
            pools = [pool.clone() for pool in batch.pools]
            expected = forward(params, config, batch, lambda q, layer: q, ops)
            assert torch.equal(found, expected)
            assert all(torch.equal(*pair) for pair in zip(pools, batch.pools, strict=True))
    return 0.0


if __name__ == "__main__":
    found = main([])
    sys.stdout.write(json.dumps(found, indent=1, default=str))
    sys.exit(0 if found["ok"] else 1)
