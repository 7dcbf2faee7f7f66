"""Each backend on the GPU against attention in float32; `kernels.py build ...` compiles what
FlashInfer needs.
"""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from attrs import asdict, evolve, field, frozen

from headstock import registry
from headstock.spi import AttentionBackend, AttentionStep, GraphSupport, LayerInfo, Phase
from headstock_conformance import attention as cases
from headstock_conformance.attention import AttentionCase

DEVICE = "cuda"
PAGE_SIZES = (16, 32, 64, 128)
RATIOS = (1, 2, 4, 7)
TYPES = (torch.bfloat16, torch.float16)
LAYER = LayerInfo(index=0, group=0, scale=128**-0.5)


@frozen
class Contestant:
    """A backend with options, and the types to try it with."""

    name: str
    options: tuple[str, ...] = ()
    types: tuple[torch.dtype, ...] = TYPES
    phases: tuple[Phase, ...] = tuple(Phase)

    def __str__(self) -> str:
        return " ".join((self.name, *self.options))

    def tail(self, page_size: int, phase: Phase) -> float:
        """What is left over of last pages: no NaN where a kernel copies pages whole
        (FlashAttention-3 those of multiples of 128, FMHA v2 all).
        """
        whole = (
            page_size % 128 == 0
            if self.name == "fa"
            else self.name == "trtllm" and phase is not Phase.DECODE
        )
        return 7.0 if whole else math.nan

    def make(self, case: AttentionCase) -> AttentionBackend:
        """The backend over the case's pool."""
        spec = registry.load_spec("attention", self.name)
        registry.require_installed(spec)
        options = registry.make_options(spec, self.options)
        context = cases.context_of(case, options, max_rows=256, max_seq_len=16_384)
        query = evolve(context.query, phases=frozenset(self.phases))
        return registry.import_implementation(spec)(evolve(context, query=query))


@frozen
class Findings:
    """What was tried: how often it was right, the largest error, and what went wrong."""

    passed: dict[str, int] = field(factory=dict)
    largest_error: dict[str, float] = field(factory=dict)
    failed: list[str] = field(factory=list)

    def attempt(self, who: object, what: str, work: Callable[[], float]) -> None:
        """Do one piece of work and count it.   writes: self"""
        who = str(who)
        try:
            error = work()
            torch.cuda.synchronize()
        except Exception as problem:
            self.failed.append(
                f"{who}: {what}: {type(problem).__name__}: {' '.join(str(problem).split())[:300]}"
            )
            return
        self.passed[who] = self.passed.get(who, 0) + 1
        self.largest_error[who] = max(error, self.largest_error.get(who, 0.0))


OWN = Contestant("fa", ("fa.triton_rows=64",))
"""The plugin's own kernel in all decode steps of the cases, also where `auto` has it not."""
FIRST = (Contestant("sdpa"), Contestant("fa"), OWN, Contestant("fa", ("fa.num_splits=5",)))
COMPILED = (
    Contestant("fi"),
    Contestant("fi", ("fi.prefill=fa2", "fi.tensor_cores=off")),
    Contestant("fi", ("fi.prefill=fa2", "fi.tensor_cores=on")),
)


def main(builds: list[subprocess.Popen[bytes]]) -> dict[str, Any]:
    """All cases; FlashInfer's when it is compiled."""
    found, began = Findings(), time.monotonic()
    for who in FIRST:
        matrix(who, found)
    fa = Contestant("fa")
    for page_size, head_dim in ((64, 64), (64, 96), (64, 256), (1000, 128), (256, 128)):
        shape(fa, found, page_size=page_size, head_dim=head_dim)
    for layer in (evolve(LAYER, window=1), evolve(LAYER, window=100), evolve(LAYER, softcap=5.0)):
        shape(fa, found, layer=layer)
    for head_dim in (64, 80, 256):
        shape(OWN, found, page_size=40, head_dim=head_dim)
    for layer in (evolve(LAYER, window=100), evolve(LAYER, softcap=5.0)):
        shape(OWN, found, layer=layer)
    codes = [build.wait() for build in builds]
    compiled = time.monotonic() - began
    for who in COMPILED:
        matrix(who, found)
        shape(who, found, page_size=1000)
        for head_dim in (64, 256):
            shape(who, found, head_dim=head_dim)
        found.attempt(who, "many heads", lambda who=who: many_heads(who))
    eight_bit(Contestant("fi", ("fi.prefill=fa2",)), found)
    eight_bit(fa, found, tolerance=0.1, narrow_queries=True)  # its probabilities have 8 bits too
    for who in (fa, OWN, *COMPILED):
        for attempt in (replay, no_sync, three_steps_in_flight, three_replays_in_flight):
            found.attempt(who, attempt.__name__, lambda who=who, attempt=attempt: attempt(who))
    about = {
        "builds": codes,
        "seconds_until_compiled": round(compiled, 1),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "fa": registry.load_spec("attention", "fa").summary,
    }
    return {"ok": not found.failed and not any(codes)} | about | asdict(found)


def matrix(who: Contestant, found: Findings) -> None:
    """Phases, page sizes, query heads a KV head and types; pages that no row owns are NaN."""
    for phase, page_size, ratio, dtype in combinations(who):

        def work(
            phase: Phase = phase, page_size: int = page_size, ratio: int = ratio, dtype: Any = dtype
        ) -> float:
            case = made(
                phase,
                page_size=page_size,
                heads=2 * ratio,
                dtype=dtype,
                tail=who.tail(page_size, phase),
            )
            return cases.check(
                who.make(case), case, LAYER, with_lse=who.name != "trtllm" and ratio % 2 == 0
            )

        found.attempt(who, f"{phase.value}, pages of {page_size}, {ratio} heads, {dtype}", work)


def combinations(who: Contestant) -> Iterator[tuple[Phase, int, int, torch.dtype]]:
    """What `matrix` goes through."""
    for dtype in who.types:
        for phase in who.phases:
            for page_size in PAGE_SIZES:
                yield from ((phase, page_size, ratio, dtype) for ratio in RATIOS)


def made(
    phase: Phase,
    *,
    page_size: int = 64,
    heads: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    **more: Any,
) -> AttentionCase:
    """A case of rows around page ends, on the GPU."""
    lens = cases.around(phase, page_size)
    lens = [each for each in lens if each[1] <= cases.MAX_SEQ_LEN]
    return cases.make(
        phase, lens, page_size=page_size, heads=heads, dtype=dtype, device=DEVICE, **more
    )


def shape(who: Contestant, found: Findings, layer: LayerInfo = LAYER, **more: Any) -> None:
    """Every phase of one shape."""
    for phase in who.phases:

        def work(phase: Phase = phase) -> float:
            case = made(phase, tail=who.tail(more.get("page_size", 64), phase), **more)
            return cases.check(who.make(case), case, layer)

        found.attempt(who, f"{phase.value}, {more}, {layer}", work)


def eight_bit(
    who: Contestant,
    found: Findings,
    tail: float = math.nan,
    tolerance: float | None = None,
    narrow_queries: bool = False,
) -> None:
    """KV in 8-bit floats with scales (a NaN of 8 bits is as good as any where no row owns it).

    `narrow_queries`: queries that 8 bits hold, for backends that round them to these.
    """
    for phase in who.phases:

        def work(phase: Phase = phase) -> float:
            case = cases.in_8_bits(made(phase, tail=tail), 0.5, 2.0)
            if narrow_queries:
                case = evolve(case, q=case.q.to(torch.float8_e4m3fn).to(case.q.dtype))
            layer = evolve(LAYER, k_scale=0.5, v_scale=2.0)
            return cases.check(who.make(case), case, layer, tolerance=tolerance)

        found.attempt(f"{who} 8-bit KV", phase.value, work)


def replay(who: Contestant) -> float:
    """A captured decode step gives the right answer for other lengths, tables and fewer rows."""
    assert registry.load_spec("attention", who.name).capabilities.graph >= GraphSupport.DECODE
    rows = [[1500] * 12] + [
        [1 + (seed * 131 + row * 97) % 1500 for row in range(count)]
        for seed, count in ((1, 12), (2, 12), (3, 5), (4, 1))
    ]
    made = [
        cases.make(
            Phase.DECODE,
            [(1, n) for n in lens],
            page_size=64,
            dtype=torch.bfloat16,
            device=DEVICE,
            seed=seed,
        )
        for seed, lens in enumerate(rows)
    ]
    return cases.check_replays(who.make(made[0]), made, LAYER, bucket=16, record=captured)


def many_heads(who: Contestant) -> float:
    """Replays of 256 rows of 64 heads over 8 KV heads, whose partial results are larger than any
    option's default.
    """
    made = [
        cases.make(
            Phase.DECODE,
            [(1, 1 + (seed * 131 + row * 97) % longest) for row in range(256)],
            page_size=64,
            heads=64,
            kv_heads=8,
            dtype=torch.bfloat16,
            device=DEVICE,
            seed=seed,
        )
        for seed, longest in ((1, 400), (2, 200))
    ]
    return cases.check_replays(who.make(made[0]), made, LAYER, bucket=256, record=captured)


def captured(work: Callable[[], None]) -> Callable[[], None]:
    """The replay of a graph of the work."""
    work()  # libraries load code when first used, which no capture allows
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def no_sync(who: Contestant) -> float:
    """Planning, also of a replay, and attention ask the device nothing."""
    case = made(Phase.EXTEND, tail=who.tail(64, Phase.EXTEND))
    backend = who.make(case)
    cases.check(backend, case, LAYER)
    out = torch.empty_like(case.q)
    step = made(Phase.DECODE).step
    backend.graph_init([step.num_rows], cases.MAX_SEQ_LEN)
    static = backend.graph_plan(step.num_rows, step)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        backend.graph_update(static, step)
        backend.forward(case.q, LAYER, backend.plan(case.step), out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return cases.compare(out, cases.expected(case, LAYER)[0])


def three_steps_in_flight(who: Contestant) -> float:
    """Steps planned while the device is busy with other work are not mixed up by their uploads."""
    case = made(Phase.DECODE)
    backend = who.make(case)
    cases.check(backend, case, LAYER)
    return in_flight(case, lambda q, step, out: backend.forward(q, LAYER, backend.plan(step), out))


def three_replays_in_flight(who: Contestant) -> float:
    """One graph's plan, written anew for each of three replays while the device is busy: each
    computes its own step.
    """
    case = made(Phase.DECODE)
    backend = who.make(case)
    backend.graph_init([case.step.num_rows], cases.MAX_SEQ_LEN)
    plan = backend.graph_plan(case.step.num_rows, case.step)
    q, out = case.q.clone(), torch.empty_like(case.q)
    graph = captured(lambda: backend.forward(q, LAYER, plan, out))

    def attend(queries: torch.Tensor, step: AttentionStep, answer: torch.Tensor) -> None:
        q.copy_(queries)
        backend.graph_update(plan, step)
        graph()
        answer.copy_(out)

    return in_flight(case, attend)


def in_flight(
    case: AttentionCase, attend: Callable[[torch.Tensor, AttentionStep, torch.Tensor], None]
) -> float:
    """The largest error of the case's rows in three orders, each asked for while the device is at
    work before it.
    """
    lens, table = case.step.host_context_lens, case.step.page_tables[0]
    orders = [
        torch.randperm(len(lens), generator=torch.Generator().manual_seed(seed))
        for seed in range(3)
    ]
    steps = [
        cases.step_of(Phase.DECODE, [(1, n) for n in lens[each].tolist()], (table[each],))
        for each in orders
    ]
    queries = [case.q[order] for order in orders]
    outs = [torch.empty_like(case.q) for _ in orders]
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # cycles, about 0.1 s
    for step, q, out in zip(steps, queries, outs, strict=True):
        attend(q, step, out)
    answer = cases.expected(case, LAYER)[0]
    return max(cases.compare(out, answer[order]) for out, order in zip(outs, orders, strict=True))


def build(
    q_dtype: str, kv_dtype: str, prefill: str, tensor_cores: str, head_dim: str = "128"
) -> None:
    """Compile the kernels of one kind of FlashInfer backend, by making it."""
    sizes = {"dtype": getattr(torch, q_dtype), "head_dim": int(head_dim)}
    case = cases.make(Phase.DECODE, [(1, 5)], device=DEVICE, unused=0.0, **sizes)
    case = evolve(case, pool=case.pool.to(getattr(torch, kv_dtype)))
    Contestant("fi", (f"fi.prefill={prefill}", f"fi.tensor_cores={tensor_cores}")).make(case)


if __name__ == "__main__" and sys.argv[1:2] == ["build"]:
    build(*sys.argv[2:])
