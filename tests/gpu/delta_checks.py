"""Gated delta rules of `triton` on a GPU: right in graphs, and the same bits whatever is beside."""

from __future__ import annotations

from collections.abc import Sequence

import delta_rule_cases as cases
import torch
from attrs import evolve, frozen
from gpu.op_times import replayed
from torch import Tensor

from headstock.nn.delta_spans import CHUNK
from headstock.nn.saved_states import SavedStates
from headstock.spi import Batch, DeltaRule
from headstock_conformance.ops.cases import error
from headstock_triton import delta_rule
from headstock_triton.delta_rule import DeltaInputs, DeltaSteps

DEVICE = "cuda"
SHAPES = {
    "27B": DeltaRule(key_heads=16, value_heads=48, key_dim=128, value_dim=128, taps=4),
    "35B-A3B": DeltaRule(key_heads=16, value_heads=32, key_dim=128, value_dim=128, taps=4),
}
STEPS: Sequence[Sequence[tuple[int, int]]] = (
    [(0, 5), (0, 70), (0, 1), (0, 300)],
    [(5, 6), (70, 71), (1, 2), (300, 330)],
    [(6, 6), (71, 260), (2, 5), (330, 512)],
    [(6, 130), (260, 260), (0, 63), (512, 513)],
    [(0, 1), (260, 320), (63, 65), (0, 256)],
)
"""Intervals of positions of four rows, step by step; some begin again."""


@frozen
class Step:
    """A step on the device, with everything that its kernels need."""

    batch: Batch
    inputs: DeltaInputs
    steps: DeltaSteps
    pages: Tensor


def make_step(
    delta: DeltaRule, spans: Sequence[tuple[int, int]], seed: int = 1, padding: int = 0
) -> Step:
    """Rows on pages of their own, with random inputs in bfloat16."""
    batch = cases.move_batch(cases.make_delta_batch(spans, padding), DEVICE)
    inputs = cases.make_delta_inputs(delta, len(batch.tokens), torch.bfloat16, seed, DEVICE)
    (pages,) = batch.state_pages
    assert pages is not None
    return Step(batch, inputs, DeltaSteps.of(batch), pages)


def new_state(delta: DeltaRule, pages: int) -> Tensor:
    """Memories of other sequences."""
    shape = (pages, delta.value_heads, delta.key_dim, delta.value_dim)
    return torch.full(shape, torch.nan, device=DEVICE)


def run(delta: DeltaRule, step: Step, state: Tensor, pdl: bool = False) -> Tensor:
    """What the kernels compute.   writes: state"""
    drafts = SavedStates.of(step.batch, 0)
    return delta_rule.apply_delta_rule_(
        step.inputs, delta, state, step.pages, step.steps, drafts, pdl=pdl
    )


def check_steps() -> dict[str, float]:
    """The largest errors of a graph's replays beside core's operations in float32."""
    delta, size, worst = SHAPES["27B"], 640, {"out": 0.0, "state": 0.0}
    state, expected = new_state(delta, 5), new_state(delta, 5)
    static = make_step(delta, STEPS[0], padding=size - 376)

    def work() -> Tensor:
        steps = DeltaSteps.of(static.batch)
        return delta_rule.apply_delta_rule_(static.inputs, delta, state, static.pages, steps)

    graph, out = replayed(work)
    state.fill_(torch.nan)
    for seed, spans in enumerate(STEPS):
        tokens = sum(stop - start for start, stop in spans)
        step = make_step(delta, spans, seed + 1, size - tokens)
        for name in ("starts", "query_start"):
            getattr(static.batch, name).copy_(getattr(step.batch, name))
        for name in ("mixed", "gates", "outer_gate"):
            getattr(static.inputs, name).copy_(getattr(step.inputs, name))
        graph.replay()
        alone = cases.move_batch(cases.make_delta_batch(spans), DEVICE)
        inputs = cases.cut_inputs(step.inputs, 0, tokens)
        wanted = cases.compute_in_float32(inputs, delta, expected, alone)
        worst["out"] = max(worst["out"], error(out[:tokens].float(), wanted))
        there = [row + 1 for row, (start, stop) in enumerate(spans) if stop > start]
        worst["state"] = max(worst["state"], error(state[there], expected[there]))
        assert not out[tokens:].any(), "zeros for tokens of no row"
    assert max(worst.values()) < cases.LIMITS[torch.bfloat16], worst
    return worst


def check_bits() -> dict[str, bool]:
    """Whether neither neighbours, cuts at chunks nor decode change a bit."""
    delta, length = SHAPES["27B"], 4 * CHUNK + 9
    whole = make_step(delta, [(0, length)])
    other = make_step(delta, [(0, 203)], 2)
    alone, beside = new_state(delta, 2), new_state(delta, 4)
    expected = run(delta, whole, alone)
    parts = []
    for start, stop in ((0, CHUNK), (CHUNK, 4 * CHUNK), (4 * CHUNK, length)):
        spans = [(3, 3 + 17 + start), (start, stop), (0, 203)]
        beside[1] = 0.1
        step = make_step(delta, spans)
        part = cases.cut_inputs(whole.inputs, start, stop)
        first = cases.make_delta_inputs(delta, 17 + start, torch.bfloat16, 3, DEVICE)
        step = evolve(step, inputs=cases.join_inputs([first, part, other.inputs]))
        out = run(delta, step, beside)
        parts.append(out[17 + start :][: stop - start])
    cuts = torch.equal(torch.cat(parts), expected) and torch.equal(beside[2], alone[1])
    # Tokens that fill no chunk, one by one beside others.
    state, single = new_state(delta, 4).fill_(0.01), new_state(delta, 4).fill_(0.01)
    few = make_step(delta, [(CHUNK + 1, CHUNK + 41)])
    tokens, pages = (torch.tensor(each, device=DEVICE) for each in ([0, 3, 5], [2, 3, 0]))
    few = evolve(few, batch=evolve(few.batch, saved_tokens=tokens, saved_pages=(pages,)))
    prompt, same = run(delta, few, state), True
    behind = []
    for at in range(40):
        row = cases.cut_inputs(few.inputs, at, at + 1)
        start = CHUNK + 1 + at
        step = make_step(delta, [(start, start + 1), (7, 8), (0, 1)][: 1 + at % 3])
        step = evolve(step, inputs=cases.join_inputs([row] * (1 + at % 3)))
        same &= torch.equal(run(delta, step, single, pdl=True)[0], prompt[at])
        behind += [single[1].clone()] if at in (0, 3) else []
    return {
        "cuts and neighbours": cuts,
        "decode": same and torch.equal(single[1], state[1]),
        "drafts": torch.equal(torch.stack(behind), state[2:]),
    }
