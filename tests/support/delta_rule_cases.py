"""Steps of gated delta rules, for kernels that compute them beside core's torch operations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import evolve, fields_dict
from torch import Tensor

from headstock.nn.delta_rule import (
    apply_delta_rule_,
    make_decay,
    normalize_gated,
    split_heads,
)
from headstock.nn.delta_spans import TokenSpans
from headstock.nn.saved_states import SavedStates
from headstock.spi import Batch, DeltaRule
from headstock_triton.delta_rule import DeltaInputs

EPS = 1e-5
LIMITS = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Errors of results, as a share of the largest number that is right."""


def make_delta_batch(
    spans: Sequence[tuple[int, int]], padding: int = 0, pages: Sequence[int] | None = None
) -> Batch:
    """A step of rows at these intervals of positions, with so many tokens of no row behind."""
    counts = [stop - start for start, stop in spans]
    positions = [at for span in spans for at in range(*span)] + [0] * padding
    size = len(positions)
    return Batch(
        tokens=torch.zeros(size, dtype=torch.int64),
        positions=torch.tensor(positions),
        token_rows=torch.zeros(size, dtype=torch.int64),
        row_ids=torch.arange(len(spans)),
        starts=torch.tensor([start for start, _ in spans]),
        query_start=torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()]).int(),
        max_query_len=max(*counts, 1 + bool(padding)),
        slots=(),
        pools=(),
        logit_indices=None,
        state_pages=(torch.tensor(pages or range(1, len(spans) + 1)),),
    )


def move_batch(batch: Batch, device: str) -> Batch:
    """The batch with its tensors on the device."""
    moved = {
        name: value.to(device)
        for name in fields_dict(Batch)
        if isinstance(value := getattr(batch, name), Tensor)
    }
    pages, drafts = (
        tuple(each.to(device) for each in pages if each is not None)
        for pages in (batch.state_pages, batch.saved_pages)
    )
    return evolve(batch, **moved, state_pages=pages, saved_pages=drafts)


def make_delta_inputs(
    delta: DeltaRule, tokens: int, dtype: torch.dtype, seed: int, device: str = "cpu"
) -> DeltaInputs:
    """Random inputs; those of layers are of the seed 0."""
    noise = torch.Generator().manual_seed(seed)
    fixed = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=noise).to(dtype).to(device)

    return DeltaInputs(
        mixed=draw(tokens, delta.channels),
        gates=draw(tokens, 2 * delta.value_heads),
        outer_gate=draw(tokens, delta.width),
        rates=torch.rand(delta.value_heads, generator=fixed).to(device) * 0.5,
        biases=torch.randn(delta.value_heads, generator=fixed).to(device),
        weight=(torch.rand(delta.value_dim, generator=fixed) + 0.5).to(dtype).to(device),
        eps=EPS,
    )


def join_inputs(parts: Sequence[DeltaInputs]) -> DeltaInputs:
    """The inputs of several rows, one after the other."""
    joined = {
        name: torch.cat([getattr(part, name) for part in parts])
        for name in ("mixed", "gates", "outer_gate")
    }
    return evolve(parts[0], **joined)


def cut_inputs(inputs: DeltaInputs, start: int, stop: int) -> DeltaInputs:
    """Those of some tokens."""
    cut = {name: getattr(inputs, name)[start:stop] for name in ("mixed", "gates", "outer_gate")}
    return evolve(inputs, **cut)


def compute_in_float32(
    inputs: DeltaInputs, delta: DeltaRule, state: Tensor, batch: Batch
) -> Tensor:
    """What kernels compute, by core's operations.   writes: state"""
    beta, decay = inputs.gates.float().chunk(2, -1)
    pages = batch.state_pages[0]
    assert pages is not None
    out = apply_delta_rule_(
        *split_heads(inputs.mixed.float(), delta),
        make_decay(decay, inputs.rates, inputs.biases),
        beta.sigmoid(),
        state,
        pages,
        TokenSpans.of(batch, may_read=True),
        SavedStates.of(batch, 0),
    )
    gate = inputs.outer_gate.float().view(out.shape)
    return normalize_gated(out, gate, inputs.weight.float(), inputs.eps).flatten(1)
