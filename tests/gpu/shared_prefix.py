"""Decode rows that share leading pages on the GPU: right, the same bits in graphs, and how fast."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from attrs import asdict, evolve
from gpu.graphs import Compared
from gpu.kernels import LAYER, Contestant, Findings, captured
from gpu.prompts import compared as compared_prompts
from gpu.speed import device_us
from gpu.tokens import questions

from headstock import LLM, SamplingParams
from headstock.spi import LayerInfo
from headstock_conformance import attention as cases
from headstock_conformance.attention import AttentionCase
from headstock_conformance.attention import shared_prefix_cases as shared_cases

LAYOUTS = (
    *shared_cases.LAYOUTS,
    ([(64, 8)], [700, 3], [1 + 5 * row for row in range(64)]),
    ([(33, 16), (2, 1), (17, 4)], [40, 1, 90], [1 + 3 * row for row in range(52)]),
    ([], [40, 3], []),
)
TIMED = (
    *((256, 32), (256, 8), (128, 8), (32, 16), (16, 32), (8, 32)),
    # Near where reading once begins to pay.
    *((128, 4), (64, 8), (32, 8), (16, 16), (4, 64)),
)
"""(rows, pages of 64 tokens that all of them share)"""
SETTINGS: dict[str, Any] = {
    "device": "cuda",
    "num_pages": 4096,
    "max_seq_len": 2048,
    "max_running_requests": 48,
    "page_size": 16,
    "attn": "fa",
    "defer_graphs": False,
}


def main(builds: list[subprocess.Popen[bytes]]) -> dict[str, Any]:
    """All of it; nothing needs to be compiled before."""
    found, fa = Findings(), Contestant("fa", ("fa.shared_prefix=on",))
    for page_size in (16, 64, 128):
        for dtype in (torch.bfloat16, torch.float16):
            for heads, kv_heads in ((4, 4), (8, 4), (28, 4)):
                shape = {"page_size": page_size, "heads": heads, "kv_heads": kv_heads}
                made = [make(layout, dtype=dtype, **shape) for layout in LAYOUTS]
                found.attempt(fa, f"{shape} {dtype}", lambda made=made: check_all(fa, made))
    made = [make(layout) for layout in LAYOUTS]
    for layer in (evolve(LAYER, softcap=5.0), evolve(LAYER, window=100)):
        found.attempt(fa, str(layer), lambda layer=layer: check_all(fa, made, layer))
    made.sort(key=lambda case: len(case.pool), reverse=True)
    found.attempt(
        fa,
        "replays",
        lambda: shared_cases.check_replays(fa.make(made[0]), LAYER, made, rows=80, record=captured),
    )
    mixed = [make(layout, prompts=prompts) for layout, prompts in shared_cases.MIXED_LAYOUTS]
    mixed.sort(key=lambda case: len(case.pool), reverse=True)
    for layer in (LAYER, evolve(LAYER, softcap=5.0), evolve(LAYER, window=100)):
        found.attempt(
            fa,
            f"replays beside prompts, {layer}",
            lambda layer=layer: shared_cases.check_mixed_replays(
                fa.make(mixed[0]), layer, mixed, record=captured
            ),
        )
    engine = {runner: answers(runner) for runner in ("cudagraph", "eager")}
    times = {f"{rows} rows of {64 * pages}": layer_us(rows, pages) for rows, pages in TIMED}
    ok = not found.failed and all(each["ok"] for each in engine.values())
    return {"ok": ok, "engine": engine, "layer_us": times} | asdict(found)


def make(layout: Any, **more: Any) -> AttentionCase:
    """A case on the GPU; what is left over of last pages is finite, as the engine sees to it."""
    return shared_cases.make(
        *layout, **{"page_size": 64, "dtype": torch.bfloat16, "device": "cuda", "tail": 7.0} | more
    )


def check_all(who: Contestant, made: list[AttentionCase], layer: LayerInfo = LAYER) -> float:
    """The largest error of these cases."""
    return max(cases.check(who.make(case), case, layer, with_lse=True) for case in made)


def answers(runner: str) -> dict[str, Any]:
    """The demo model's answers about facts that all questions begin with, by grouped rows or not.

    Replays of grouped rows are computed once more, and have to give the same bits.
    """
    asked = [*questions()] * 2
    outputs, steps = {}, Counter[str]()
    for value in ("off", "on"):
        with LLM("demo", runner=runner, opt=(f"fa.shared_prefix={value}",), **SETTINGS) as llm:
            executor = llm._session.engine.executor
            if value == "on":
                count_groups(executor.steps.tracker, steps)
            is_graph = runner == "cudagraph"
            compared = Compared(executor.runner) if is_graph else None
            beside = compared_prompts(executor.runner) if is_graph else nullcontext(Counter())
            with beside as prompts:
                for params in (
                    SamplingParams(temperature=0, max_tokens=16, ignore_eos=True),
                    SamplingParams(temperature=0.8, seed=5, max_tokens=60, ignore_eos=True),
                ):
                    texts = [each.outputs[0].text for each in llm.generate(asked, params)]
                    outputs[value, params.temperature] = texts
            if compared is not None:
                steps.update({f"{value}: {name}": n for name, n in compared.steps.items()})
            steps.update({f"{value}: prompts {name}": n for name, n in prompts.items()})
    right = sum(
        text.startswith(answer)
        for text, answer in zip(outputs["on", 0.0], [*questions().values()] * 2, strict=True)
    )
    same = {
        f"same texts at {temperature}": sum(
            a == b
            for a, b in zip(outputs["off", temperature], outputs["on", temperature], strict=True)
        )
        for temperature in (0.0, 0.8)
    }
    differ = sum(count for name, count in steps.items() if "differ" in name)
    ok = right == len(asked) and steps["groups"] > 20 and not differ
    return {"ok": ok, "right": right, "of": len(asked)} | same | dict(steps)


def count_groups(tracker: Any, steps: Counter[str]) -> None:
    """Count steps with groups, and the groups of the step that has most."""
    group_plan: Callable[..., Any] = tracker.group_plan

    def counted(plan: Any) -> Any:
        grouped = group_plan(plan)
        steps["groups"] += grouped is not None
        steps["groups beside prompts"] += grouped is not None and plan.num_decode < len(plan.rows)
        if grouped is not None:
            steps["most groups"] = max(steps["most groups"], len(grouped.groups.counts))
        return grouped

    tracker.group_plan = counted


def layer_us(rows: int, pages: int) -> dict[str, float]:
    """Microseconds of a layer's attention in a graph, each row for itself and grouped."""
    own = [96 + (row * 37) % 129 for row in range(rows)]
    case = make(([(rows, pages)], [], own), heads=16, kv_heads=8)
    backend, out = Contestant("fa").make(case), torch.empty_like(case.q)
    backend.graph_init([rows], cases.MAX_SEQ_LEN * 4)
    found = {}
    for name, step in (("plain", evolve(case.step, shared=None)), ("grouped", case.step)):
        plan = backend.capture_plan(step)

        def work(plan: Any = plan) -> None:
            for _ in range(20):
                backend.forward(case.q, LAYER, plan, out)

        found[name] = round(device_us(captured(work), launches=2) / 20, 1)
    return found
