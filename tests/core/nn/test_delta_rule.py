"""The gated delta rule: what no chunk, neighbour or earlier sequence of a page may change."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from often import count_examples
from torch import Tensor

from headstock.nn.delta_rule import apply_delta_rule_, make_decay, normalize_gated
from headstock.nn.delta_spans import CHUNK, TokenSpans
from headstock.nn.saved_states import SavedStates
from headstock.spi import Batch
from headstock_conformance.device_reads import forbid_device_reads

KEYS, VALUES, WIDTH, DEPTH = 2, 4, 6, 5


def make_inputs(seed: int, count: int) -> list[Tensor]:
    """q, k, v, decay and beta of so many tokens."""
    noise = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(count, *shape, generator=noise)

    q, k, v = draw(KEYS, WIDTH), draw(KEYS, WIDTH), draw(VALUES, DEPTH)
    return [q, k, v, -draw(VALUES).abs(), draw(VALUES).sigmoid()]


def run(
    rows: list[list[Tensor]],
    starts: list[int],
    state: Tensor,
    padding: int = 0,
    may_read: bool = True,
    drafts: dict[int, int] | None = None,
) -> Any:
    """What the rows read in one step; their pages are 1, 2, ...

    drafts: tokens of the step, each with the page for the state behind it
    """
    counts = [len(row[0]) for row in rows]
    ends = torch.tensor([0, *counts]).cumsum(0)
    inputs = [
        torch.cat([*parts, parts[0].new_ones(padding, *parts[0].shape[1:])])
        for parts in zip(*rows, strict=True)
    ]
    batch: Any = Batch.__new__(Batch)
    for name, value in (
        ("starts", torch.tensor(starts)),
        ("query_start", ends),
        ("max_query_len", max(counts)),
        ("tokens", inputs[0]),
        ("saved_tokens", None if drafts is None else torch.tensor(list(drafts))),
        ("saved_pages", (torch.tensor(list(drafts.values())),) if drafts else ()),
    ):
        object.__setattr__(batch, name, value)
    pages = torch.arange(1, len(rows) + 1)
    with nullcontext() if may_read else forbid_device_reads():
        spans = TokenSpans.of(batch, may_read=may_read)
        saved_pages = SavedStates.of(batch, 0)
        out = apply_delta_rule_(*inputs, state, pages, spans, saved_pages)
    return [out[a:b] for a, b in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)]


@pytest.mark.parametrize("may_read", [True, False])
@pytest.mark.parametrize("start", [3, 62, 64])
def test_states_behind_drafts_are_those_of_sequences_that_end_there(
    start: int, may_read: bool
) -> None:
    row, prompt = make_inputs(1, 80), make_inputs(2, 140)
    state, alone = new_state(7), [new_state(1) for _ in range(3)]
    # A row that verifies two drafts, a long prompt, and a row of one token.
    before = [take(row, 0, start), take(prompt, 0, 2), take(row, 0, 9)]
    run(before, [0, 0, 0], state)
    now = [take(row, start, start + 3), take(prompt, 2, 140), take(row, 9, 10)]
    run(now, [start, 2, 9], state, 2, may_read, {0: 5, 1: 6, 141: 7, 2: 0})

    for count, own in enumerate(alone, start=1):
        run([take(row, 0, start)], [0], own)
        run([take(row, start, start + count)], [start], own)
    assert torch.equal(state[5], alone[0][1])
    assert torch.equal(state[6], alone[1][1])
    assert torch.equal(state[1], alone[2][1])
    assert torch.equal(state[7], state[3]) and state[4].isnan().all()


@pytest.mark.parametrize("may_read", [True, False])
def test_states_amid_a_prompt_are_those_of_prompts_that_end_there(may_read: bool) -> None:
    row, other = make_inputs(1, 300), make_inputs(2, 90)
    state, alone = new_state(5), new_state(1)
    run([take(row, 0, 70), take(other, 0, 5)], [0, 0], state)

    # The first one's heads end at 128, and a chunk at 192; the second's heads end at 64.
    saves = {57: 3, 121: 4, 230 + 58: 5}
    run([take(row, 70, 300), take(other, 5, 90)], [70, 5], state, 3, may_read, saves)

    for page, inputs, stop in ((3, row, 128), (4, row, 192), (5, other, 64)):
        for start, end in ((0, 70), (70, stop)) if inputs is row else ((0, 5), (5, stop)):
            run([take(inputs, start, end)], [start], alone)
        assert torch.equal(state[page], alone[1])


def new_state(rows: int) -> Tensor:
    return torch.full((rows + 1, VALUES, WIDTH, DEPTH), torch.nan)


def recur(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """The definition, token by token in float64."""
    q, k = (each.double().repeat_interleave(VALUES // KEYS, 1) for each in (q, k))
    q, k = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
    memory, outs = torch.zeros(VALUES, WIDTH, DEPTH, dtype=torch.float64), []
    for at in range(len(q)):
        memory = memory * decay[at].double().exp()[:, None, None]
        known = torch.einsum("hkv,hk->hv", memory, k[at])
        learned = beta[at].double()[:, None] * (v[at].double() - known)
        memory = memory + torch.einsum("hk,hv->hkv", k[at], learned)
        outs.append(torch.einsum("hkv,hk->hv", memory, q[at]) / WIDTH**0.5)
    return torch.stack(outs)


def take(row: list[Tensor], start: int, stop: int) -> list[Tensor]:
    return [each[start:stop] for each in row]


@settings(max_examples=count_examples(40))
@given(st.integers(0, 9), st.integers(1, 40) | st.integers(60, 200), st.integers(0, 70))
def test_it_is_what_the_definition_says(seed: int, count: int, cut: int) -> None:
    inputs, state = make_inputs(seed, count), new_state(1)
    cuts = [0, cut, count] if 0 < cut < count else [0, count]
    parts = [run([take(inputs, start, stop)], [start], state)[0] for start, stop in pairwise(cuts)]
    found = torch.cat(parts).double()
    torch.testing.assert_close(found, recur(*inputs), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("decay", [0.0, -1e-3, -30.0, -1e4])
def test_chunks_hold_for_memories_that_forget_nothing_or_all(decay: float) -> None:
    q, k, v, _, beta = make_inputs(1, 2 * CHUNK)
    # Alike keys, so that every token's update depends on all before it.
    inputs = [q, k * 1e-2 + k[:1], v, torch.full_like(beta, decay), torch.ones_like(beta)]
    (found,) = run([inputs], [0], new_state(1))
    torch.testing.assert_close(found.double(), recur(*inputs), atol=1e-3, rtol=1e-3)


@settings(max_examples=count_examples(40))
@given(
    st.lists(st.integers(1, 2), min_size=1, max_size=3),
    st.integers(1, 130),
    st.integers(0, 70),
    st.booleans(),
)
def test_neither_cuts_at_multiples_of_the_chunk_nor_neighbours_change_a_bit(
    chunks: list[int], tail: int, padding: int, may_read: bool
) -> None:
    """Steps of whole chunks, a last one of any length, and another sequence beside each."""
    row, other = make_inputs(tail, CHUNK * sum(chunks) + tail), make_inputs(7, tail)
    state, beside, start, outs = new_state(1), new_state(2), 0, []
    (alone,) = run([row], [0], state)
    beside[2] = 0.0
    for length in (*(CHUNK * count for count in chunks), tail):
        part = take(row, start, start + length)
        own, _ = run([part, other], [start, 3], beside, padding, may_read)
        outs.append(own)
        start += length
    assert torch.equal(torch.cat(outs), alone)
    assert torch.equal(beside[1], state[1])


@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12)), min_size=1, max_size=4),
    st.integers(0, 3),
    st.integers(0, 5),
)
def test_neither_cuts_nor_neighbours_nor_padding_change_a_bit(
    sizes: list[tuple[int, int]], padding: int, seed: int
) -> None:
    rows = [make_inputs(seed + at, first + rest) for at, (first, rest) in enumerate(sizes)]
    alone, states = [], []
    for row in rows:
        state = new_state(1)
        alone += run([row], [0], state)
        states.append(state[1])
    state = new_state(len(rows))
    parts = [[each[:first] for each in row] for row, (first, _) in zip(rows, sizes, strict=True)]
    begun = run(parts, [0] * len(rows), state, padding)
    # The rest one by one, as in decode, beside rows that have none left.
    outs = [[each] for each in begun]
    for at, (row, (first, rest)) in enumerate(zip(rows, sizes, strict=True)):
        own = torch.stack((state[0], state[at + 1]))
        for index in range(first, first + rest):
            outs[at] += run([[each[index : index + 1] for each in row]], [index], own)
        assert torch.equal(torch.cat(outs[at]), alone[at])
        assert torch.equal(own[1], states[at])


def test_decay_and_the_gated_norm_are_those_of_the_paper() -> None:
    a, rate, bias = torch.randn(3, 4), torch.rand(4), torch.randn(4)
    wanted = -rate * torch.log1p(torch.exp(a + bias))
    torch.testing.assert_close(make_decay(a, rate, bias), wanted)
    x, gate, weight = torch.randn(3, 2, 8), torch.randn(3, 2, 8), torch.rand(8)
    normed = x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt() * weight
    found = normalize_gated(x, gate, weight, 0.1)
    torch.testing.assert_close(found, normed * gate * gate.sigmoid())
