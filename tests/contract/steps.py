"""The tensors of a step: each field changes what is attended to, computed or sampled."""

from __future__ import annotations

import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from headstock.debug.attention_reference import gather_context
from headstock.debug.kv_writes import WrittenSlots
from headstock.debug.watch import DebugWatch
from headstock.execution.pooling import find_pooled_health
from headstock.nn.eager_step import run_eager_step
from headstock.nn.sampler import sample
from headstock.nn.short_conv import ConvInputs, convolve_
from headstock.ops.torch_ops import TorchOps
from headstock.spi import (
    AttentionContext,
    AttentionStep,
    Batch,
    KVLayer,
    LayerInfo,
    Phase,
    Pooling,
    Program,
    Sample,
    Sampling,
    SharedPrefixes,
)
from headstock_conformance import attention as attention_cases
from headstock_conformance.attention import shared_prefix_cases as shared_cases
from headstock_sdpa.backend import SdpaBackend
from headstock_sdpa.options import SdpaOptions

from . import models
from .vary import Case, vary

LAYER = LayerInfo(index=1, group=0, scale=0.2, window=5, softcap=1.0)
DECODE = attention_cases.make(Phase.DECODE, [(1, 7), (1, 20), (1, 3)], head_dim=8, unused=0.0)
EXTEND = attention_cases.make(Phase.EXTEND, [(2, 7), (3, 20), (3, 3)], head_dim=8, unused=0.0)
SHARED = shared_cases.make([(2, 1)], [9], [3, 5], head_dim=8, unused=0.0)
OPTIONS = SdpaOptions(shared_prefix="on")
OTHER_POOL = torch.zeros_like(DECODE.pool)


def attend(
    case: attention_cases.Case, layer: LayerInfo, step: AttentionStep, context: AttentionContext
) -> Tensor:
    """What `sdpa` writes for the step of a case."""
    out = torch.full_like(case.q, math.nan)
    backend = SdpaBackend(context)
    backend.forward(case.q, layer, backend.plan(step), out)
    return out


def context_of(case: attention_cases.Case) -> AttentionContext:
    """What `sdpa` is built from; layer 1 has the pool, and another one of zeros."""
    context = attention_cases.context_of(case, OPTIONS, layers=2)
    return attrs.evolve(context, pools={0: OTHER_POOL, 1: case.pool})


def attend_step(step: AttentionStep) -> object:
    """Attention of prompt rows with this step."""
    return attend(EXTEND, LAYER, step, context_of(EXTEND))


def attend_decode(step: AttentionStep) -> object:
    """Attention of decode rows with this step, and the way that it goes."""
    backend, layer = SdpaBackend(context_of(DECODE)), attrs.evolve(LAYER, window=None)
    plan, out = backend.plan(step), torch.full_like(DECODE.q, math.nan)
    backend.forward(DECODE.q, layer, plan, out)
    # Rounded: rows of one token have the same result either way, but for the order of sums.
    return [out.double().mul(1e4).round(), [type(index) for index in plan.indexes.values()]]


def attend_layer(layer: LayerInfo) -> object:
    """Attention of decode rows in this layer, with a second page table of dummy pages."""
    case = attention_cases.in_second_group(DECODE)
    (zeros, table) = case.step.page_tables
    step = attrs.evolve(case.step, page_tables=(table, zeros))
    return attend(case, layer, step, context_of(DECODE))


def attend_context(context: AttentionContext) -> object:
    """Attention of decode rows by a backend that is made of this context."""
    backend = SdpaBackend(context)
    return [
        attend(DECODE, LAYER, DECODE.step, context),
        backend.min_shared_tokens,
        backend.is_sparse,
    ]


def attend_shared(shared: SharedPrefixes) -> object:
    """Attention of rows that share pages."""
    step = attrs.evolve(SHARED.step, shared=shared)
    return attend(SHARED, attrs.evolve(LAYER, window=None), step, context_of(SHARED))


SHARED_PARTS = SHARED.step.shared
assert SHARED_PARTS is not None
LENS = DECODE.step.host_context_lens

NOTHING = np.zeros(0, np.int64)
LOGITS = torch.linspace(-2, 2, 24).view(3, 8).sin() * 3
SETTINGS = Sampling(
    temperature=torch.tensor([0.9, 1.3, 0.5]),
    top_k=torch.tensor([8, 8, 8]),
    top_p=torch.ones(3),
    min_p=torch.zeros(3),
    seeds=torch.tensor([3, 4, 5]),
    positions=torch.tensor([7, 8, 9]),
    repetition=torch.tensor([1.2, 1.0, 1.5]),
    presence=torch.tensor([0.5, 0.0, 2.0]),
    frequency=torch.tensor([0.5, 1.0, 0.0]),
    history=torch.tensor([[1, 2, 2, 7], [3, 3, 0, 1], [4, 5, 6, 7]]),
    history_lens=torch.tensor([4, 3, 4]),
    prompt_lens=torch.tensor([1, 1, 2]),
    mask=torch.full((3, 1), -1, dtype=torch.int32),
    banned=torch.zeros(3, 8, dtype=torch.bool),
    bias=torch.zeros(3, 8),
    targets=torch.tensor([1, -1, 3]),
    top_logprobs=2,
)
BANS, BIASES = torch.zeros(3, 8, dtype=torch.bool), torch.zeros(3, 8)
BANS[:, ::2] = True
BIASES[:, 5] = 9.0


def samples(sampling: Sampling) -> object:
    """What is sampled at many positions, so that any other distribution shows."""
    assert sampling.positions is not None
    return [
        sample(
            LOGITS.clone(),
            attrs.evolve(sampling, positions=sampling.positions + 17 * time),
        )
        for time in range(40)
    ]


def run(batch: Batch, *, max_logits: int = 99, changes: Any = None) -> object:
    """What a step of the model computes and writes, where attention gives back the queries."""
    batch = attrs.evolve(batch, pools=tuple(pool.clone() for pool in batch.pools))
    return [compute(batch, max_logits=max_logits, changes=changes), batch.pools]


def store(batch: Batch) -> object:
    """How much a step stores in its pools, and how much in those of `STEP`."""
    for pool in (*batch.pools, *POOLS):
        pool.zero_()
    compute(batch)
    counts = [[int(pool.count_nonzero()) for pool in pools] for pools in (batch.pools, POOLS)]
    for pool in POOLS:
        pool.zero_()
    return counts


def compute(batch: Batch, *, max_logits: int = 99, changes: Any = None) -> Sample:
    """The samples of a step of the model, where attention gives back the queries.

    writes: the batch's pools
    """
    config = models.CONFIG
    layer = SimpleNamespace(empty_output=torch.empty_like)
    program: Any = Program(
        config=config,
        params=models.load(config, models.FAMILY.params(config)),
        model=models.FAMILY,
        ops=TorchOps(),
        row_tables=None,  # type: ignore[arg-type]
        attention=SimpleNamespace(layers=defaultdict(lambda: layer)),  # type: ignore[arg-type]
        max_logits=max_logits,
    )
    if batch.pooling is not None and batch.pooling.sums is not None:
        sums = batch.pooling.sums.clone()
        batch = attrs.evolve(batch, pooling=attrs.evolve(batch.pooling, sums=sums))
    step: Any = SimpleNamespace(
        is_decode=False,
        batch=lambda: batch,
        attention=lambda: lambda q, _, out: out.copy_(q),
        sampling=lambda: Sampling(top_logprobs=1),
        list_stored=lambda: (NOTHING, NOTHING, NOTHING),
        order=None,
    )
    program = attrs.evolve(program, **(changes or {}))
    program.ops.bind(program.params, config)
    return run_eager_step(program, step)


def pool_rows(batch: Batch) -> object:
    """The mean of the second row's tokens, to which the first step's sums of its row belong."""
    sums = torch.arange(3.0)[:, None].expand(3, models.CONFIG.hidden)
    return run(attrs.evolve(batch, pooling=attrs.evolve(POOLING, sums=sums)))


def list_watched(batch: Batch) -> object:
    """The rows that `--debug-invariants` names where a token's numbers are not finite."""
    watch = DebugWatch("torch", "eager", 24, torch.zeros(1, 1))
    watch.note_result(torch.ones(3, 2), batch, "mlp")
    return watch.results


def list_written(layer: KVLayer) -> object:
    """The slots that `--debug-ops` looks at after a layer has stored its keys and values."""
    slots = (torch.tensor([20, 40]), torch.tensor([33, 50]))
    batch = attrs.evolve(STEP, kv=(layer,), slots=slots)
    written = WrittenSlots.of(batch, layer, DECODE.pool[:, 0], 0)
    return written.pages, written.slots


POOLS = tuple(torch.zeros(3, 2, 4, 2, 8) for _ in models.LAYERS)
STEP = Batch(
    tokens=torch.tensor([3, 5, 7]),
    positions=torch.tensor([0, 1, 4]),
    token_rows=torch.tensor([0, 0, 1]),
    row_ids=torch.tensor([0, 1]),
    starts=torch.tensor([0, 4]),
    query_start=torch.tensor([0, 2, 3], dtype=torch.int32),
    max_query_len=2,
    slots=(torch.tensor([4, 5, 8]), torch.tensor([6, 7, 9])),
    pools=POOLS,
    logit_indices=torch.tensor([1, 2]),
)


# The second row goes on after a first step that summed up to ones.
POOLING = Pooling(
    rows=torch.tensor([1]),
    is_mean=torch.tensor([True]),
    sums=torch.ones(2, models.CONFIG.hidden),
)
# The second row has no tokens, as rows that pad a replay have none.
STATE_STEP = attrs.evolve(
    STEP,
    tokens=torch.tensor([1]),
    positions=torch.tensor([4]),
    starts=torch.tensor([4, 0]),
    query_start=torch.tensor([0, 1, 1], dtype=torch.int32),
    max_query_len=2,
    state_pages=(torch.tensor([2, 0]),),
)


KV = KVLayer(group=0, k=DECODE.pool[:, 0], v=DECODE.pool[:, 1])


def convolve(batch: Batch) -> object:
    """A convolution of its tokens, and the states after it."""
    state, x = torch.arange(24.0).view(4, 2, 3), torch.ones(len(batch.tokens), 3)
    weight = torch.tensor([[1.0], [10.0], [100.0]]).expand(3, 3)
    return [convolve_(x, weight, None, state, ConvInputs.of(batch, 0, 3)), state]


def first_tokens(sample: Sample) -> object:
    """The first of what was sampled, as a runner takes it out of what padding sampled."""
    return sample.first(1)


def _two(value: float) -> Tensor:
    return torch.full((2,), value)


CASES: dict[str, Case] = {
    **vary(
        EXTEND.step,
        attend_step,
        {
            "page_tables": (EXTEND.step.page_tables[0].flip(0),),
            "host_query_lens": np.array([3, 2, 3], np.int32),
            "host_context_lens": EXTEND.step.host_context_lens - 1,
        },
    ),
    **vary(DECODE.step, attend_decode, {"phase": Phase.EXTEND}),
    **vary(
        SHARED.step,
        lambda step: attend(SHARED, attrs.evolve(LAYER, window=None), step, context_of(SHARED)),
        {"shared": attrs.evolve(SHARED_PARTS, shared_lens=torch.zeros(3, dtype=torch.int32))},
    ),
    **vary(
        LAYER,
        attend_layer,
        {"index": 0, "group": 1, "scale": 0.9, "window": 2, "softcap": 0.0, "sinks": torch.ones(4)},
    ),
    **vary(KVLayer(group=0), lambda layer: layer.page_slots, {"k": torch.zeros(2, 4, 1, 8)}),
    **vary(KV, list_written, {"group": 1}),
    **vary(
        KV,
        lambda layer: gather_context(DECODE.step, LAYER, layer, 0),
        {"v": torch.zeros_like(DECODE.pool[:, 1])},
    ),
    **vary(LAYER, lambda layer: layer.empty_output(DECODE.q).shape, {"out_dim": 3}),
    **vary(
        context_of(DECODE),
        attend_context,
        {
            "query": attention_cases.query(kv_dtype="bfloat16"),
            "device": torch.device("meta"),
            "pools": {1: OTHER_POOL},
            "options": SdpaOptions(),
        },
    ),
    **vary(
        SHARED_PARTS,
        attend_shared,
        {
            "prefixes": attrs.evolve(
                SHARED_PARTS.prefixes, host_context_lens=np.array([15], np.int32)
            ),
            "rest": attrs.evolve(
                SHARED_PARTS.rest, host_context_lens=SHARED_PARTS.rest.host_context_lens + 1
            ),
            "shared_lens": torch.zeros_like(SHARED_PARTS.shared_lens),
        },
    ),
    **vary(
        SETTINGS,
        samples,
        {
            "temperature": torch.zeros(3),
            "top_k": torch.ones(3, dtype=torch.int64),
            "top_p": torch.full((3,), 0.1),
            "min_p": torch.ones(3),
            "seeds": torch.tensor([9, 9, 9]),
            "positions": torch.tensor([70, 80, 90]),
            "repetition": None,
            "presence": None,
            "frequency": None,
            "history": SETTINGS.history * 0,  # type: ignore[operator]
            "history_lens": torch.tensor([1, 1, 2]),
            "prompt_lens": torch.tensor([4, 3, 4]),
            "mask": torch.full((3, 1), 0b101, dtype=torch.int32),
            "banned": BANS,
            "bias": BIASES,
            "targets": None,
            "top_logprobs": -1,
        },
    ),
    **vary(
        Sample(
            tokens=torch.tensor([1, 2]),
            healthy=torch.tensor([True, True]),
            logprobs=_two(-1.0),
            top_ids=torch.tensor([[1], [2]]),
            top_logprobs=_two(-1.0)[:, None],
            ranks=torch.tensor([1, 1]),
        ),
        first_tokens,
        {
            "tokens": torch.tensor([3, 2]),
            "healthy": torch.tensor([False, True]),
            "logprobs": _two(-2.0),
            "top_ids": torch.tensor([[4], [2]]),
            "top_logprobs": _two(-3.0)[:, None],
            "ranks": torch.tensor([3, 1]),
        },
    ),
    **vary(
        STEP,
        run,
        {
            "tokens": torch.tensor([4, 5, 7]),
            "positions": torch.tensor([0, 2, 4]),
            "slots": (torch.tensor([4, 5, 10]), torch.tensor([6, 7, 9])),
            "logit_indices": None,
            "pooling": POOLING,
        },
    ),
    **vary(
        models.FAMILY,
        lambda family: compute(STEP, changes={"model": family}),
        {"logits": lambda params, config, hidden, ops: hidden.float()},
    ),
    **vary(STEP, store, {"pools": tuple(torch.zeros_like(pool) for pool in POOLS)}),
    **vary(STEP, pool_rows, {"row_ids": torch.tensor([0, 2])}),
    **vary(STEP, list_watched, {"token_rows": torch.tensor([0, 1, 1])}),
    **vary(
        POOLING,
        lambda pooling: run(attrs.evolve(STEP, pooling=pooling)),
        {
            "rows": torch.tensor([0]),
            "is_mean": torch.tensor([False]),
            "sums": torch.zeros(2, models.CONFIG.hidden),
        },
    ),
    **vary(
        Sample(tokens=torch.zeros(0), healthy=torch.zeros(0)),
        lambda sample: find_pooled_health(sample),
        {"pooled": torch.tensor([[1.0], [math.nan]])},
    ),
    **vary(
        STATE_STEP,
        convolve,
        {
            "starts": torch.tensor([0, 0]),
            "query_start": torch.tensor([0, 0, 1], dtype=torch.int32),
            "state_pages": (torch.tensor([3, 0]),),
        },
    ),
    **vary(
        attrs.evolve(
            STATE_STEP,
            tokens=torch.tensor([1, 2]),
            positions=torch.tensor([4, 5]),
            query_start=torch.tensor([0, 2, 2], dtype=torch.int32),
        ),
        convolve,
        {"max_query_len": 1},
    ),
    **vary(
        attrs.evolve(
            STATE_STEP,
            saved_tokens=torch.tensor([0]),
            saved_pages=(torch.tensor([1]),),
        ),
        convolve,
        {"saved_tokens": None, "saved_pages": (torch.tensor([3]),)},
    ),
}
