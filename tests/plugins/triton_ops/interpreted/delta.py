"""The gated delta rule of `triton` against core's, however steps cut the sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import delta_rule_cases as cases
import pytest
import torch
from attrs import evolve
from families import Case, load_paged, log_probabilities
from often import often
from torch import Tensor

from headstock.nn.delta_spans import CHUNK
from headstock.nn.saved_states import SavedStates
from headstock.spi import DeltaRule
from headstock_conformance.model.parity import expected, tokens, write
from headstock_conformance.ops.cases import error
from headstock_triton.delta_rule import DeltaInputs, DeltaSteps, apply_delta_rule_
from headstock_triton.ops import TritonOps
from headstock_triton.options import TritonOptions

DELTA = DeltaRule(key_heads=1, value_heads=2, key_dim=16, value_dim=64, taps=4)
STEPS: Sequence[Sequence[tuple[int, int]]] = (
    [(0, 5), (0, 70), (0, 1)],
    [(5, 6), (70, 71), (1, 2)],
    [(6, 6), (71, 200), (2, 5)],
    [(6, 130), (200, 200), (0, 9)],
    [(0, 1), (200, 200), (63, 65)],
)
"""Intervals of positions of three rows, step by step; some begin again."""


def run(
    inputs: DeltaInputs,
    spans: Sequence[tuple[int, int]],
    state: Tensor,
    *,
    padding: int = 0,
    pages: Sequence[int] | None = None,
) -> Tensor:
    """What the kernels compute in a step.   writes: state"""
    batch = cases.make_delta_batch(spans, padding, pages)
    (own_pages,) = batch.state_pages
    assert own_pages is not None
    return apply_delta_rule_(inputs, DELTA, state, own_pages, DeltaSteps.of(batch))


def new_state(pages: int) -> Tensor:
    """Memories of other sequences; another layer's lie between two pages."""
    shape = (pages, 2, DELTA.value_heads, DELTA.key_dim, DELTA.value_dim)
    return torch.full(shape, math.nan)[:, 1]


@pytest.mark.parametrize("dtype", often(1, [torch.float32, torch.bfloat16, torch.float16]))
def test_results_and_memories_are_those_of_core(dtype: torch.dtype) -> None:
    pages, limit = [4, 2, 7], cases.LIMITS[dtype]
    state = new_state(9)
    expected = state.clone()
    for step, spans in enumerate(STEPS):
        padding = 70 * (step == 2)
        batch = cases.make_delta_batch(spans, padding, pages)
        inputs = cases.make_delta_inputs(DELTA, len(batch.tokens), dtype, step + 1)

        found = run(inputs, spans, state, padding=padding, pages=pages)

        wanted = cases.compute_in_float32(inputs, DELTA, expected, batch)
        rows = int(batch.query_start[-1])
        assert error(found[:rows].float(), wanted[:rows]) < limit
        assert not found[rows:].any()
        there = [page for page, (start, stop) in zip(pages, spans, strict=True) if stop > start]
        assert error(state[there], expected[there]) < limit
    assert state[[0, 1, 3, 5, 6, 8]].isnan().all()


def test_memories_behind_drafts_are_those_of_sequences_that_end_there() -> None:
    batch = cases.make_delta_batch([(62, 65), (3, 200), (9, 10)], 1, [1, 2, 3])
    # Amid the prompt: where its heads end, and where its last chunk does.
    drafts = {0: 5, 1: 6, 2: 0, 200: 7, 3 + 60: 4, 3 + 188: 8}
    batch = evolve(
        batch,
        saved_tokens=torch.tensor(list(drafts)),
        saved_pages=(torch.tensor(list(drafts.values())),),
    )
    inputs = cases.make_delta_inputs(DELTA, len(batch.tokens), torch.bfloat16, 1)
    state = new_state(9)
    state[1:4] = torch.randn(state[1:4].shape, generator=torch.Generator().manual_seed(2))
    before = state.clone()
    (pages,) = batch.state_pages
    assert pages is not None

    apply_delta_rule_(inputs, DELTA, state, pages, DeltaSteps.of(batch), SavedStates.of(batch, 0))

    for page, own, start, first, count in (
        (5, 1, 62, 0, 1), (6, 1, 62, 0, 2), (1, 1, 62, 0, 3), (7, 3, 9, 200, 1),
        (4, 2, 3, 3, 61), (8, 2, 3, 3, 189),
    ):  # fmt: skip
        alone = before.clone()
        run(
            cases.cut_inputs(inputs, first, first + count),
            [(start, start + count)],
            alone,
            pages=[own],
        )
        assert torch.equal(state[page], alone[own])
    assert torch.equal(state[7], state[3]) and state[0].isnan().all()


def test_neither_cuts_at_multiples_of_the_chunk_nor_neighbours_change_a_bit() -> None:
    inputs = cases.make_delta_inputs(DELTA, 2 * CHUNK + 3, torch.bfloat16, 1)
    other = cases.make_delta_inputs(DELTA, CHUNK + 1, torch.bfloat16, 2)
    alone, beside = new_state(2), new_state(4)
    beside[3] = 0.5
    whole = run(inputs, [(0, 2 * CHUNK + 3)], alone)

    found = []
    for start, stop in ((0, CHUNK), (CHUNK, 2 * CHUNK), (2 * CHUNK, 2 * CHUNK + 3)):
        part = cases.cut_inputs(inputs, start, stop)
        step = [cases.cut_inputs(other, 0, 1 + start // 2), part, other]
        spans = [(0, 1 + start // 2), (start, stop), (CHUNK, 2 * CHUNK + 1)]
        out = run(cases.join_inputs([*step, other]), spans, beside, padding=CHUNK + 1)
        found.append(out[spans[0][1] :][: stop - start])

    assert torch.equal(torch.cat(found), whole)
    assert torch.equal(beside[2], alone[1])


def test_decode_gives_the_bits_of_prompts_that_fill_no_chunk() -> None:
    inputs = cases.make_delta_inputs(DELTA, 9, torch.bfloat16, 3)
    whole, single = new_state(2), new_state(3)

    prompt = run(inputs, [(CHUNK + 1, CHUNK + 10)], whole.zero_())
    single.zero_()
    for at in range(9):
        row = cases.cut_inputs(inputs, at, at + 1)
        start = CHUNK + 1 + at
        out = run(cases.join_inputs([row, row]), [(start, start + 1), (0, 1)], single)
        assert torch.equal(out[:1], prompt[at : at + 1])

    assert torch.equal(single[1], whole[1])


@pytest.mark.parametrize("rate", [0.0, 1e-3, 1e4])
def test_chunks_hold_for_memories_that_forget_nothing_or_all(rate: float) -> None:
    inputs = cases.make_delta_inputs(DELTA, 2 * CHUNK, torch.float32, 1)
    q, k, v = inputs.mixed.split((DELTA.key_dim, DELTA.key_dim, DELTA.width), 1)
    # Alike keys, so that every token's update depends on all before it.
    mixed = torch.cat((q, k * 1e-2 + k[:1], v), 1)
    gates = torch.full_like(inputs.gates, 9.0)
    inputs = evolve(inputs, mixed=mixed, gates=gates, rates=torch.full((2,), rate))
    state, expected = new_state(2), new_state(2)

    found = run(inputs, [(0, 2 * CHUNK)], state)

    batch = cases.make_delta_batch([(0, 2 * CHUNK)])
    assert error(found, cases.compute_in_float32(inputs, DELTA, expected, batch)) < 1e-3


@pytest.mark.full
def test_a_family_says_what_transformers_says(tmp_path: Path) -> None:
    sizes = {
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 32,
        "rms_norm_eps": 0.01,
    }
    case, prompt = Case("qwen3_next", sizes), tokens(CHUNK + 9)
    write(tmp_path, case.hf)
    ops = TritonOps(TritonOptions(delta_rule=True))

    ours = log_probabilities(tmp_path, case.family, prompt, ops, CHUNK + 3)

    torch.testing.assert_close(ours, expected(tmp_path, prompt), atol=1e-3, rtol=0)
    table = load_paged(tmp_path, case.family, ops, 12).ops.table
    assert "delta_rule" in table.lines()[0], "fused"


def test_a_step_without_tokens() -> None:
    inputs = cases.make_delta_inputs(DELTA, 0, torch.bfloat16, 1)

    assert run(inputs, [(0, 0)] * 3, new_state(4)).shape == (0, DELTA.width)
