"""The attention backend `triton` on the GPU: right at every head size, and how fast at Gemma-4's.

    PYTHONPATH=tests:tests/support python -m gpu.triton_attention

It prints one JSON object. Attention is compared with float64 and, in rows of 32,768 tokens, with
`sdpa`. Times are microseconds of a layer, replayed; decode has gigabytes a second too.
`headstock plugins check attention:triton` is a check of the part `checks`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from attrs import asdict, evolve, frozen
from gpu import kernels
from gpu.kernels import DEVICE, LAYER, Contestant, Findings
from gpu.speed import device_us

from headstock import registry
from headstock.spi import AttentionBackend, LayerInfo, Phase
from headstock_conformance import attention as cases
from headstock_conformance.attention import AttentionCase

TRITON = Contestant("triton")
HEAD_DIMS = (64, 80, 96, 128, 192, 256, 512)
PAGE_SIZE = 64
CONTEXTS = (1024, 4096, 8192, 32_768)
ROWS = (1, 8, 64)
PROMPTS = {
    "4 prompts of 2,048": [(2048, 2048)] * 4,
    "512 tokens after 8,192": [(512, 8704)],
    "a prompt of 8,192": [(8192, 8192)],
}
LONGEST = 32_768
MOST_ROW_TOKENS = 64 * LONGEST
"""Tokens of the largest case: 17 GB of keys and values of Gemma-4's full layers."""


@frozen(kw_only=True)
class Shape:
    """Attention of a kind of layers."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None

    @property
    def layer(self) -> LayerInfo:
        """A layer; Gemma-4 normalizes queries and keys, and has a scale of 1."""
        return evolve(LAYER, scale=self.head_dim**-0.5, window=self.window)


FULL = Shape(heads=32, kv_heads=4, head_dim=512)
"""Gemma-4-31B's full layers."""
SLIDING = Shape(heads=32, kv_heads=16, head_dim=256, window=1024)
"""Its layers with a window."""
TIMED = (
    ("triton", "512", FULL),
    ("sdpa", "512", FULL),
    ("triton", "256", SLIDING),
    ("fa", "256", SLIDING),
    ("triton", "256, no window", evolve(SLIDING, window=None)),
    ("fa", "256, no window", evolve(SLIDING, window=None)),
    ("triton", "128", Shape(heads=16, kv_heads=8, head_dim=128)),
    ("fa", "128", Shape(heads=16, kv_heads=8, head_dim=128)),
)


def main(builds: list[object]) -> dict[str, Any]:
    """Right or wrong, then times."""
    found = Findings()
    for head_dim in HEAD_DIMS:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            kernels.shape(TRITON, found, head_dim=head_dim, dtype=dtype)
    for page_size in (1, 16, 40, 128, 1000):
        kernels.shape(TRITON, found, page_size=page_size, head_dim=512)
    for ratio in (1, 7, 16, 71):
        for head_dim in (64, 512):
            sizes = {"heads": ratio, "kv_heads": 1, "head_dim": head_dim}
            kernels.shape(TRITON, found, **sizes)
    layers = (
        evolve(LAYER, window=1),
        evolve(LAYER, window=100),
        evolve(LAYER, softcap=5.0),
        cases.add_sinks(LAYER, 4, DEVICE),
        cases.add_sinks(evolve(LAYER, window=100, softcap=5.0), 4, DEVICE),
    )
    for layer in layers:
        for head_dim in (128, 512):
            kernels.shape(TRITON, found, layer, head_dim=head_dim)
    kernels.eight_bit(TRITON, found)
    for attempt in (
        kernels.replay,
        kernels.no_sync,
        kernels.three_steps_in_flight,
        kernels.three_replays_in_flight,
        kernels.many_heads,
    ):
        found.attempt(TRITON, attempt.__name__, partial(attempt, TRITON))
    for shape in (FULL, SLIDING):
        found.attempt(TRITON, f"same bits alone, {shape}", partial(compare_alone, shape))
        found.attempt(TRITON, f"long rows, {shape}", partial(compare_with_sdpa, shape))
    return {"ok": not found.failed} | asdict(found) | time_all()


def make_case(shape: Shape, phase: Phase, lens: list[tuple[int, int]]) -> AttentionCase:
    """A step over random pages, made on the GPU, without the keys and values of each row."""
    counts = [-(-context // PAGE_SIZE) for _, context in lens]
    size = (sum(counts) + 1, 2, PAGE_SIZE, shape.kv_heads, shape.head_dim)
    pool = torch.empty(size, dtype=torch.bfloat16, device=DEVICE).normal_()
    order = torch.randperm(sum(counts), device=DEVICE).int() + 1
    table = torch.zeros(len(lens), max(counts), dtype=torch.int32, device=DEVICE)
    for row, pages in enumerate(order.split(counts)):
        table[row, : len(pages)] = pages
    tokens = sum(queries for queries, _ in lens)
    q = torch.randn(tokens, shape.heads, shape.head_dim, device=DEVICE).bfloat16()
    step = cases.step_of(phase, lens, (table,))
    return AttentionCase(pool, step, q, (), ())


def open_backend(name: str, case: AttentionCase) -> AttentionBackend:
    """The backend of this name over the case's pool."""
    spec = registry.load_spec("attention", name)
    registry.require_installed(spec)
    options = registry.make_options(spec, ())
    context = cases.context_of(case, options, max_rows=max(ROWS), max_seq_len=LONGEST)
    backend: AttentionBackend = registry.import_implementation(spec)(context)
    return backend


def attend(name: str, case: AttentionCase, layer: LayerInfo) -> torch.Tensor:
    """What the backend writes."""
    backend = open_backend(name, case)
    out = torch.empty_like(case.q)
    backend.forward(case.q, layer, backend.plan(case.step), out)
    backend.close()
    return out


def compare_alone(shape: Shape) -> float:
    """Rows get the same bits alone and in a batch."""
    contexts = [1, 130, 5000, 777, 2048, 31_000]
    case = make_case(shape, Phase.DECODE, [(1, context) for context in contexts])
    together = attend("triton", case, shape.layer)
    for row, context in enumerate(contexts):
        table = case.step.page_tables[0][row : row + 1]
        step = cases.step_of(Phase.DECODE, [(1, context)], (table,))
        alone = attend("triton", evolve(case, step=step, q=case.q[row : row + 1]), shape.layer)
        assert torch.equal(alone[0], together[row]), f"the row of {context} tokens differs"
    return 0.0


def compare_with_sdpa(shape: Shape) -> float:
    """Decode and a chunk of a prompt in rows of up to 32,768 tokens."""
    worst = 0.0
    for phase, lens in (
        (Phase.DECODE, [(1, LONGEST), (1, 20_000), (1, 1)]),
        (Phase.EXTEND, [(300, 16_000), (3, LONGEST)]),
        (Phase.EXTEND, [(5, 16_000), (3, LONGEST)]),
    ):
        case = make_case(shape, phase, lens)
        answers = [attend(name, case, shape.layer) for name in ("triton", "sdpa")]
        worst = max(worst, cases.compare(answers[0], answers[1].float()))
    return worst


def time_all() -> dict[str, Any]:
    """Microseconds by what was timed, or what went wrong; gigabytes a second of decode steps."""
    microseconds: dict[str, float | str] = {}
    speeds: dict[str, float] = {}
    for name, text, shape in TIMED:
        for rows in ROWS:
            for context in CONTEXTS:
                # `sdpa` gathers all keys and values, once more in memory.
                if name == "sdpa" and rows * context > MOST_ROW_TOKENS // 4:
                    continue
                what = f"{name}, {text}: {rows} rows of {context}"
                lens = [(1, context)] * rows
                taken = time_one(name, shape, Phase.DECODE, lens)
                microseconds[what] = taken
                if isinstance(taken, float):
                    seen = min(context, shape.window or context)
                    numbers = 2 * rows * seen * shape.kv_heads * shape.head_dim
                    speeds[what] = round(2 * numbers / taken / 1000, 1)
        for what, lens in PROMPTS.items():
            phase = Phase.PREFILL if lens[0][0] == lens[0][1] else Phase.EXTEND
            microseconds[f"{name}, {text}: {what}"] = time_one(name, shape, phase, lens)
    return {"microseconds": microseconds, "gigabytes_a_second": speeds}


def time_one(name: str, shape: Shape, phase: Phase, lens: list[tuple[int, int]]) -> float | str:
    """Microseconds of a layer's attention, or the error."""
    try:
        case = make_case(shape, phase, lens)
        backend = open_backend(name, case)
        out = torch.empty_like(case.q)
        plan = backend.plan(case.step)
        work: Callable[[], None] = partial(backend.forward, case.q, shape.layer, plan, out)
        if name != "sdpa":
            work = kernels.captured(work)
        launches = 5 if phase is not Phase.DECODE or name == "sdpa" else 20
        taken = device_us(work, launches)
        backend.close()
        return taken
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    finally:
        torch.cuda.empty_cache()


if __name__ == "__main__":
    print(json.dumps(main([]), indent=1))  # noqa: T201
