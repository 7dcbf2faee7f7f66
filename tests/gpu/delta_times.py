"""The gated delta rule on the GPU: right beside float32 with graphs replayed, and microseconds of
each part at the shapes of Qwen3.6, beside torch's operations and `fla-core` where that is there.

    export PYTHONPATH=core/src:plugins/conformance/src:plugins/triton-ops/src:tests:tests/support
    python -m gpu.delta_times [--fla]

Each line is JSON. `fla-core` is imported from PYTHONPATH; it also tells whether its bits change.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import delta_rule_cases as cases
import torch
from attrs import evolve
from gpu.delta_checks import DEVICE, SHAPES, check_bits, check_steps, make_step, new_state, run
from gpu.op_times import device_us, graph_us
from torch import Tensor
from torch.nn import functional as F

from headstock.nn.delta_rule import (
    apply_delta_rule_,
    make_decay,
    normalize_gated,
    split_heads,
)
from headstock.nn.delta_spans import TokenSpans
from headstock.nn.short_conv import ConvInputs, convolve_
from headstock.spi import DeltaRule
from headstock_conformance.ops.cases import error
from headstock_triton.conv import convolve_silu_
from headstock_triton.delta_rule import DeltaSteps
from headstock_triton.pdl import has_pdl

PROMPTS = {"1 x 128": (1, 128), "1 x 4096": (1, 4096), "8 x 4096": (8, 4096)}
MIXED = {
    "31 decode, 1 x 1000": [*[(50, 51)] * 31, (0, 1000)],
    "1 x 63": [(0, 63)],
    "16 x 63": [(0, 63)] * 16,
}


def main(options: Sequence[str]) -> None:
    """Print all of it."""
    for label, work in list_works(options):
        began = time.monotonic()
        try:
            found: Any = work()
            torch.cuda.synchronize()
        except Exception as problem:
            found = f"{type(problem).__name__}: {' '.join(str(problem).split())[:600]}"
        spent = round(time.monotonic() - began, 1)
        sys.stdout.write(json.dumps({label: found, "seconds": spent}) + "\n")
        sys.stdout.flush()


def list_works(options: Sequence[str]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What is done, by label."""
    yield "device", lambda: [torch.cuda.get_device_name(), torch.__version__]
    yield "right", check_steps
    yield "bits", check_bits
    for label, delta in SHAPES.items():
        for rows in (1, 8, 32):
            yield f"{label}, decode, {rows} rows", lambda d=delta, r=rows: time_decode(d, r)
        for name, (rows, tokens) in PROMPTS.items():
            spans = [(0, tokens)] * rows
            yield f"{label}, {name}", lambda d=delta, s=spans: time_prompt(d, s)
        for name, spans in MIXED.items():
            yield f"{label}, {name}", lambda d=delta, s=spans: time_prompt(d, s)
    for label, delta in SHAPES.items():
        for rows in (1, 32):
            yield (
                f"{label}, torch, decode, {rows} rows",
                lambda d=delta, r=rows: time_torch(d, [(100, 101)] * r, 1),
            )
        yield f"{label}, torch, 1 x 1024", lambda d=delta: time_torch(d, [(0, 1024)], 1024)
    if "--fla" in options:
        yield "fla, decode", lambda: {rows: time_fla(SHAPES["27B"], rows, 1) for rows in (1, 8, 32)}
        for name, (rows, tokens) in PROMPTS.items():
            yield f"fla, {name}", lambda r=rows, t=tokens: time_fla(SHAPES["27B"], r, t)
        yield "fla, bits", check_fla


def time_decode(delta: DeltaRule, rows: int) -> dict[str, float]:
    """Microseconds of the convolution and of the rule, on memories that no cache holds."""
    copies = max(2, 64 // rows)
    step, pdl = make_step(delta, [(100, 101)] * rows), has_pdl(torch.device(DEVICE))
    state = new_state(delta, rows * copies + 1).fill_(0.1)
    pages = [step.pages + rows * index for index in range(copies)]
    conv = torch.zeros(rows * copies + 1, delta.taps - 1, delta.channels, device=DEVICE)
    conv = conv.to(torch.bfloat16)
    weight = torch.rand(delta.taps, delta.channels, device=DEVICE).to(torch.bfloat16)
    firsts = ConvInputs.of(step.batch, 0, delta.taps)
    inputs = [evolve(firsts, pages=each) for each in pages]

    def convolve(index: int) -> Tensor:
        return convolve_silu_(step.inputs.mixed, weight, None, conv, inputs[index], pdl=pdl)

    def learn(index: int) -> Tensor:
        return run(delta, evolve(step, pages=pages[index]), state, pdl)

    def both(index: int) -> Tensor:
        own = evolve(step.inputs, mixed=convolve(index))
        return run(delta, evolve(step, pages=pages[index], inputs=own), state, pdl)

    works = {"both": both, "conv": convolve, "rule": learn}
    found = {name: round(graph_us(work, copies), 2) for name, work in works.items()}
    moved = 2 * rows * delta.value_heads * delta.key_dim * delta.value_dim * 4
    return found | {"gb_s": round(moved / found["rule"] / 1e3)}


def time_prompt(delta: DeltaRule, spans: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Microseconds of the convolution and of the rule, and of each of its kernels."""
    step = make_step(delta, spans)
    state = new_state(delta, len(spans) + 1)
    state.fill_(0.1)
    conv = torch.zeros(len(spans) + 1, delta.taps - 1, delta.channels, device=DEVICE)
    conv = conv.to(torch.bfloat16)
    weight = torch.rand(delta.taps, delta.channels, device=DEVICE).to(torch.bfloat16)
    inputs = ConvInputs.of(step.batch, 0, delta.taps)
    found: dict[str, Any] = {}
    found["conv"] = round(
        graph_us(lambda i: convolve_silu_(step.inputs.mixed, weight, None, conv, inputs), 1, 4)
    )
    found["steps"] = round(graph_us(lambda i: DeltaSteps.of(step.batch), 1, 4), 1)
    found["rule"] = round(graph_us(lambda i: run(delta, step, state), 1, 4), 1)
    return found | {"kernels": list_kernels(lambda: run(delta, step, state))}


def list_kernels(work: Callable[[], object]) -> dict[str, float]:
    """Microseconds of each kernel."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    work()
    with torch.profiler.profile(activities=activities) as found:
        work()
        torch.cuda.synchronize()
    times: dict[str, float] = {}
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            name = event.name[:40]
            times[name] = round(times.get(name, 0.0) + event.device_time, 1)
    return times


def time_torch(delta: DeltaRule, spans: Sequence[tuple[int, int]], longest: int) -> float:
    """Microseconds of torch's operations for the same, with the convolution."""
    step = make_step(delta, spans)
    state = new_state(delta, len(spans) + 1).fill_(0.1)
    conv = torch.zeros(len(spans) + 1, delta.taps - 1, delta.channels, device=DEVICE)
    conv = conv.to(torch.bfloat16)
    weight = torch.rand(delta.taps, delta.channels, device=DEVICE).to(torch.bfloat16)
    inputs = ConvInputs.of(step.batch, 0, delta.taps)
    spans_of_step = TokenSpans.of(step.batch, may_read=False)
    own = step.inputs

    def work(index: int) -> Tensor:
        mixed = F.silu(convolve_(own.mixed, weight, None, conv, inputs))
        beta, decay = own.gates.chunk(2, -1)
        out = apply_delta_rule_(
            *split_heads(mixed, delta),
            make_decay(decay, own.rates, own.biases),
            beta.sigmoid().float(),
            state,
            step.pages,
            spans_of_step,
        )
        return normalize_gated(out, own.outer_gate.view(out.shape), own.weight, own.eps)

    return round(graph_us(work, 1, 2) if longest == 1 else device_us(work), 1)


def make_fla_inputs(delta: DeltaRule, rows: int, tokens: int) -> dict[str, Any]:
    """What `fla-core` takes, after the convolution, gates and a gather of states."""
    own = cases.make_delta_inputs(delta, rows * tokens, torch.bfloat16, 1, DEVICE)
    q, k, v = (each.contiguous()[None] for each in split_heads(own.mixed, delta))
    beta, decay = own.gates.chunk(2, -1)
    return {
        "q": q,
        "k": k,
        "v": v,
        "g": make_decay(decay, own.rates, own.biases)[None],
        "beta": beta.sigmoid()[None],
        "initial_state": new_state(delta, rows).fill_(0.1),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
        "cu_seqlens": torch.arange(rows + 1, device=DEVICE) * tokens,
    }


def time_fla(delta: DeltaRule, rows: int, tokens: int) -> dict[str, Any]:
    """Microseconds of `fla-core` without convolution, gates, pages and norm."""
    from fla.ops.gated_delta_rule import (
        chunk_gated_delta_rule,
        fused_recurrent_gated_delta_rule,
    )

    inputs = make_fla_inputs(delta, rows, tokens)
    function = fused_recurrent_gated_delta_rule if tokens == 1 else chunk_gated_delta_rule
    with torch.inference_mode():
        function(**inputs)
        found: dict[str, Any] = {"kernels": list_kernels(lambda: function(**inputs))}
        try:
            found["us"] = round(graph_us(lambda i: function(**inputs), 1, 4), 1)
        except RuntimeError as problem:
            torch.cuda.synchronize()
            found["no graph"] = str(problem)[:200]
            found["us"] = round(device_us(lambda i: function(**inputs)), 1)
    return found


def check_fla() -> dict[str, Any]:
    """Whether a neighbour or a cut at 64 changes a bit of `fla-core`, and its error."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    delta, length = SHAPES["27B"], 256
    both = make_fla_inputs(delta, 2, length)
    both["initial_state"].zero_()

    def take(start: int, stop: int, state: Tensor) -> dict[str, Any]:
        cut = {name: both[name][:, start:stop].contiguous() for name in "qkvg"}
        cut["beta"] = both["beta"][:, start:stop].contiguous()
        ends = torch.tensor([0, stop - start], device=DEVICE)
        return both | cut | {"initial_state": state, "cu_seqlens": ends}

    with torch.inference_mode():
        out, states = chunk_gated_delta_rule(**both)
        state = both["initial_state"][:1].clone()
        alone, last = chunk_gated_delta_rule(**take(0, length, state))
        first, middle = chunk_gated_delta_rule(**take(0, 64, state))
        second, end = chunk_gated_delta_rule(**take(64, length, middle))
    found = {
        "neighbours": torch.equal(out[:, :length], alone) and torch.equal(states[:1], last),
        "cuts": torch.equal(torch.cat((first, second), 1), alone) and torch.equal(end, last),
    }
    batch = cases.move_batch(cases.make_delta_batch([(0, length)]), DEVICE)
    memory = new_state(delta, 2)
    wanted = apply_delta_rule_(
        *(both[name][0, :length].float() for name in "qkvg"),
        both["beta"][0, :length].float(),
        memory,
        batch.state_pages[0],
        TokenSpans.of(batch, may_read=True),
    )
    return found | {"out": error(alone[0].float(), wanted), "state": error(last, memory[1:])}


if __name__ == "__main__":
    main(sys.argv[1:])
