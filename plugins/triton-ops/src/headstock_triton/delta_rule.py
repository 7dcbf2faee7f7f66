"""The gated delta rule over memories in pages: launches of its kernels."""

from __future__ import annotations

from functools import cache

import torch
import triton
from attrs import frozen
from torch import Tensor

from headstock.nn.delta_spans import CHUNK
from headstock.nn.saved_states import SavedStates
from headstock.spi import Batch, DeltaRule, Stream
from headstock_triton.delta_chunks import (
    learn_chunks_kernel,
    list_chunks_kernel,
    normalize_chunks_kernel,
    prepare_chunks_kernel,
)
from headstock_triton.delta_tokens import learn_tokens_kernel
from headstock_triton.pdl import launch_options

DIMS = frozenset((16, 32, 64, 128))
"""Sizes of keys and values that the kernels take: a memory has to fit into registers."""


LARGE_TILE = 190_000
"""Bytes of shared memory that 64 values of three chunks take on Hopper, in 16 bits."""


@cache
def count_shared_bytes(device: torch.device) -> int:
    """The most shared memory of a program; 0 without a GPU."""
    if device.type != "cuda":
        return 0
    # Stubs of torch do not have it.
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 0))


def can_apply(delta: DeltaRule) -> bool:
    """Whether the kernels take memories of these sizes."""
    return delta.key_dim in DIMS and delta.value_dim in DIMS


@frozen(eq=False)
class DeltaSteps:
    """How a step's rows go through their tokens, found on the device; all layers share it.

    starts, query_start: of the batch
    chunk_tokens: [most chunks] int32, the first token of each chunk; -1 where a step has fewer
    chunk_rows: [most rows with chunks] int32, rows with chunks; -1 alike
    is_decode: every row has one token
    """

    starts: Tensor
    query_start: Tensor
    chunk_tokens: Tensor
    chunk_rows: Tensor
    is_decode: bool

    @classmethod
    def of(cls, batch: Batch, *, pdl: bool = False) -> DeltaSteps:
        """Those of a step. A graph may capture it: it never reads the device."""
        starts, query_start = batch.starts, batch.query_start
        rows, tokens = len(starts), len(batch.tokens)
        is_decode = batch.max_query_len == 1 and rows == tokens and batch.saved_tokens is None
        # A row of fewer tokens has no whole chunk, as rows that verify drafts.
        most = tokens // CHUNK if batch.max_query_len >= CHUNK else 0
        chunk_tokens = torch.empty(most, dtype=torch.int32, device=starts.device)
        chunk_rows = torch.empty_like(chunk_tokens)
        if most:
            list_chunks_kernel[(most,)](
                starts, query_start, chunk_tokens, chunk_rows, rows,
                ROWS=triton.next_power_of_2(rows), num_warps=4, **launch_options(pdl),
            )  # fmt: skip
        return cls(starts, query_start, chunk_tokens, chunk_rows[:rows], is_decode)


def find_delta_steps(x: Stream, batch: Batch, *, pdl: bool = False) -> DeltaSteps:
    """How delta rules go through the step's tokens.   writes: x.shared"""
    steps: DeltaSteps | None = x.shared.get("delta_steps")
    if steps is None:
        steps = x.shared["delta_steps"] = DeltaSteps.of(batch, pdl=pdl)
    return steps


@frozen(eq=False, kw_only=True)
class DeltaInputs:
    """What a layer's delta rule computes with.

    mixed: [tokens, channels], queries, keys and values after the convolution and silu
    gates: [tokens, 2 * value_heads], betas before the sigmoid, and then decays
    outer_gate: [tokens, value_heads * value_dim], of the norm
    rates, biases: [value_heads] float32, of decays
    weight: [value_dim], of the norm
    """

    mixed: Tensor
    gates: Tensor
    outer_gate: Tensor
    rates: Tensor
    biases: Tensor
    weight: Tensor
    eps: float


@frozen(kw_only=True)
class DeltaTiles:
    """How work is cut into programs.

    warps: of a program that goes through tokens
    block, stages: values of a program that goes through chunks, and chunks that it loads ahead
    """

    warps: int
    block: int
    stages: int

    @classmethod
    def of(cls, delta: DeltaRule, device: torch.device) -> DeltaTiles:
        """Those for memories of these sizes; the rows of a step change nothing."""
        # 128 numbers of a memory for each thread. 48 heads of 128 by 128 on an H200: one token of
        # 1 / 8 / 32 rows takes 4.3 / 18 / 59 us with 4 warps, 6.4 / 24 / 88 with 8.
        warps = max(delta.key_dim * delta.value_dim // 4096, delta.key_dim // 64, 1)
        # There too, chunks of 4,096 tokens take 125 us with these, 169 with the smaller ones.
        block, stages = (64, 3) if count_shared_bytes(device) >= LARGE_TILE else (32, 2)
        return cls(warps=warps, block=min(delta.value_dim, block), stages=stages)


def apply_delta_rule_(
    inputs: DeltaInputs,
    delta: DeltaRule,
    state: Tensor,
    pages: Tensor,
    steps: DeltaSteps,
    saved: SavedStates | None = None,
    *,
    tiles: DeltaTiles | None = None,
    pdl: bool = False,
) -> Tensor:
    """What queries read, normalized and gated: `headstock.nn.delta_rule` in a few kernels.

    Products of chunks have factors in the type of `mixed`, and sums in float32 as memories are.
    As there, neither neighbours nor cuts at multiples of `CHUNK` change a bit.

    pages: [rows] int64    saved: at multiples of a chunk, or in rows with fewer tokens
    returns: [tokens, value_heads * value_dim], zeros for tokens of no row
    writes: state [pages, value_heads, key_dim, value_dim] float32, at the rows' pages and where
        states are saved
    """
    mixed, gates, outer_gate = inputs.mixed, inputs.gates, inputs.outer_gate
    tokens, heads = len(mixed), delta.value_heads
    # Zeros, as what is left of another step may be NaN.
    make = mixed.new_empty if steps.is_decode else mixed.new_zeros
    out = make(tokens, delta.width)
    if not tokens:
        return out
    assert state[0].is_contiguous() and mixed.is_contiguous()
    assert gates.is_contiguous() and outer_gate.is_contiguous()
    sizes = {
        "KEY_HEADS": delta.key_heads,
        "VALUE_HEADS": heads,
        "KEY_DIM": delta.key_dim,
        "VALUE_DIM": delta.value_dim,
    }
    tiles = tiles or DeltaTiles.of(delta, mixed.device)
    overlap, most = launch_options(pdl), len(steps.chunk_tokens)
    # Without saved states, pass a pointer that is never read.
    by_token = pages if saved is None else saved.by_token
    rows = (pages, steps.starts, steps.query_start, steps.chunk_rows)

    def take_tokens(count: int, after_chunks: int) -> None:
        learn_tokens_kernel[(heads, count)](
            mixed, gates, inputs.rates, inputs.biases, outer_gate, inputs.weight, state, *rows,
            by_token, out,
            inputs.eps, state.stride(0), after_chunks,
            **sizes, GROUPS=tiles.warps, SAVED=saved is not None, num_warps=tiles.warps,
            **overlap,
        )  # fmt: skip

    take_tokens(len(pages), 0)
    if most:
        updates, shares = mixed.new_empty(2, heads, tokens, CHUNK)
        factors = torch.empty(4, heads, tokens, dtype=torch.float32, device=mixed.device)
        prepare_chunks_kernel[(heads, most)](
            mixed, gates, inputs.rates, inputs.biases, steps.chunk_tokens,
            updates, shares, factors, tokens,
            **sizes, num_warps=4, **overlap,
        )  # fmt: skip
        blocks = delta.value_dim // tiles.block
        learn_chunks_kernel[(heads * blocks, len(steps.chunk_rows))](
            mixed, updates, shares, factors, state, *rows, by_token, out, tokens, state.stride(0),
            **sizes, BLOCK=tiles.block, STAGES=tiles.stages, SAVED=saved is not None, num_warps=4,
            **overlap,
        )  # fmt: skip
        normalize_chunks_kernel[(heads, most)](
            out, outer_gate, inputs.weight, steps.chunk_tokens, inputs.eps,
            VALUE_HEADS=heads, VALUE_DIM=delta.value_dim, num_warps=4, **overlap,
        )  # fmt: skip
        take_tokens(len(steps.chunk_rows), 1)
    return out
