"""The sdpa backend against attention written out, one query at a time, in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve, frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headstock.spi import AttentionContext, AttentionQuery, AttentionStep, LayerInfo, Phase
from headstock_sdpa.backend import SdpaBackend
from headstock_sdpa.plugin import spec

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@frozen(eq=False)
class Case:
    """A pool in which only what the rows own is a number, a step over it, and the same keys and values row by row.

    q: [tokens, heads, head_dim]    keys, values: one a row, [context, kv_heads, head_dim]
    """

    pool: Tensor
    step: AttentionStep
    q: Tensor
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]


def case(
    rows: list[tuple[int, int]],
    *,
    phase: Phase,
    page_size: int = 16,
    kv_heads: int = 2,
    ratio: int = 2,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    """A case of rows (query tokens, context tokens) whose pages lie about the pool in random order."""
    noise = torch.Generator().manual_seed(seed)
    counts = [-(-context // page_size) for _, context in rows]
    numbers = (torch.randperm(sum(counts) + 3, generator=noise) + 1).tolist()
    pool = torch.full((len(numbers) + 1, 2, page_size, kv_heads, head_dim), math.nan, dtype=dtype)
    pool[0] = 1000.0  # the dummy page holds anything finite
    table = torch.zeros(len(rows), max(counts) + 1, dtype=torch.int32)
    stored: tuple[list[Tensor], list[Tensor]] = ([], [])
    for row, (_, context) in enumerate(rows):
        pages = torch.tensor([numbers.pop() for _ in range(counts[row])], dtype=torch.int32)
        table[row, : len(pages)] = pages
        for side, kept in enumerate(stored):
            kept.append(torch.randn(context, kv_heads, head_dim, generator=noise).to(dtype))
            for position in range(context):
                pool[int(pages[position // page_size]), side, position % page_size] = kept[-1][position]
    queries, contexts = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    start = torch.from_numpy(np.concatenate([[0], queries.cumsum()]).astype(np.int32))
    step = AttentionStep(
        phase=phase,
        query_start=start,
        context_lens=torch.from_numpy(contexts),
        page_tables=(table,),
        host_query_lens=queries,
        host_context_lens=contexts,
    )
    q = torch.randn(int(start[-1]), kv_heads * ratio, head_dim, generator=noise).to(dtype)
    return Case(pool, step, q, tuple(stored[0]), tuple(stored[1]))


def backend(*pools: Tensor, heads: int, contiguous: bool = False) -> SdpaBackend:
    """The backend over these layers' pools."""
    _, _, page_size, kv_heads, head_dim = pools[0].shape
    dtype = str(pools[0].dtype).removeprefix("torch.")
    query = AttentionQuery(
        phases=frozenset(Phase),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        q_dtype=dtype,
        kv_dtype=dtype,
        page_size=page_size,
        contiguous=contiguous,
        features=frozenset(),
        max_rows=64,
        max_seq_len=4096,
    )
    return SdpaBackend(
        AttentionContext(
            query=query,
            capabilities=spec().capabilities,
            device=pools[0].device,
            page_size=page_size,
            pools=dict(enumerate(pools)),
            max_tokens=4096,
            options=None,
        )
    )


def expected(made: Case, layer: LayerInfo) -> tuple[Tensor, Tensor]:
    """Attention and the logarithm of its sums, each query by itself. [tokens, heads, head_dim], [tokens, heads]"""
    answers, sums = [], []
    starts = made.step.query_start.tolist()
    for row, (keys, values) in enumerate(zip(made.keys, made.values, strict=True)):
        ratio = made.q.shape[1] // keys.shape[1]
        keys, values = (side.double().repeat_interleave(ratio, 1) for side in (keys, values))
        queries = made.q[starts[row] : starts[row + 1]].double()
        for back, query in zip(range(len(queries) - 1, -1, -1), queries, strict=True):
            stop = len(keys) - back
            start = 0 if layer.window is None else max(stop - layer.window, 0)
            scores = torch.einsum("khd,hd->hk", keys[start:stop], query) * layer.scale
            if layer.softcap:
                scores = layer.softcap * torch.tanh(scores / layer.softcap)
            answers.append(torch.einsum("hk,khd->hd", scores.softmax(-1), values[start:stop]))
            sums.append(scores.logsumexp(-1))
    return torch.stack(answers), torch.stack(sums)


def attend(made: Case, layer: LayerInfo, with_lse: bool = False, device: str = "cpu") -> tuple[Tensor, Tensor | None]:
    """What the backend writes for a case on a device, its pool checked to be as before."""
    before = made.pool.clone()
    pool, q, start, lens = (t.to(device) for t in (made.pool, made.q, made.step.query_start, made.step.context_lens))
    tables = tuple(table.to(device) for table in made.step.page_tables)
    one = backend(pool, heads=q.shape[1])
    out = torch.full_like(q, math.nan)
    lse = torch.full(q.shape[:2], math.nan, device=device) if with_lse else None
    plan = one.plan(evolve(made.step, query_start=start, context_lens=lens, page_tables=tables))
    one.forward(q, layer, plan, out, lse)
    assert torch.equal(pool.cpu().view(torch.uint8), before.view(torch.uint8))
    return out.cpu(), None if lse is None else lse.cpu()


def check(made: Case, layer: LayerInfo, with_lse: bool = False, device: str = "cpu") -> None:
    """Assert that the backend's answer is the expected one."""
    out, lse = attend(made, layer, with_lse, device)
    answer, sums = expected(made, layer)
    tolerance = TOLERANCE[made.q.dtype]
    torch.testing.assert_close(out.double(), answer, atol=tolerance, rtol=tolerance)
    if lse is not None:
        torch.testing.assert_close(lse.double(), sums, atol=1e-4, rtol=1e-4)


@st.composite
def row_lengths(draw: st.DrawFn, phase: Phase, page_size: int) -> list[tuple[int, int]]:
    """One to five rows whose contexts end around a page's end."""
    rows = []
    for _ in range(draw(st.integers(1, 5))):
        near = page_size * draw(st.integers(0, 3)) + draw(st.integers(-1, 1))
        context = min(max(near, 1), 150)
        queries = {Phase.PREFILL: context, Phase.DECODE: 1}.get(phase) or draw(st.integers(1, context))
        rows.append((queries, context))
    return rows


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("page_size", [1, 3, 16, 128])
@pytest.mark.parametrize("phase", list(Phase), ids=lambda phase: phase.value)
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_every_shape_agrees_with_attention_written_out(
    phase: Phase, page_size: int, dtype: torch.dtype, device: str, data: st.DataObject
) -> None:
    def one(name: str, *values: Any) -> Any:
        return data.draw(st.sampled_from(values), name)

    head_dim = one("head_dim", 1, 5, 16, 80, 128)
    made = case(
        data.draw(row_lengths(phase, page_size), "rows"),
        phase=phase,
        page_size=page_size,
        kv_heads=one("kv_heads", 1, 2, 3),
        ratio=one("ratio", 1, 2, 7),
        head_dim=head_dim,
        dtype=dtype,
        seed=data.draw(st.integers(0, 99), "seed"),
    )
    layer = LayerInfo(
        index=0,
        group=0,
        scale=head_dim**-0.5,
        window=one("window", None, 1, 2, 16, 100),
        softcap=one("softcap", 0.0, 0.0, 0.7),
    )
    check(made, layer, with_lse=data.draw(st.booleans(), "lse"), device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_decode_rows_of_very_different_lengths_keep_their_places(
    dtype: torch.dtype, window: int | None, softcap: float, device: str
) -> None:
    lengths = [5, 900, 17, 850, *range(1, 30), 400, 390, 2]
    made = case([(1, length) for length in lengths], phase=Phase.DECODE, kv_heads=1, ratio=4, dtype=dtype)
    layer = LayerInfo(index=0, group=0, scale=0.25, window=window, softcap=softcap)
    check(made, layer, with_lse=dtype.itemsize == 4, device=device)


@pytest.mark.parametrize("window", [None, 40, 256, 300])
@pytest.mark.parametrize("rows", [[(600, 600)], [(520, 700), (1, 3), (300, 300)]])
def test_rows_longer_than_a_block_of_queries(rows: list[tuple[int, int]], window: int | None) -> None:
    made = case(rows, phase=Phase.EXTEND, kv_heads=1, head_dim=8)
    check(made, LayerInfo(index=0, group=0, scale=0.3, window=window))


@pytest.mark.parametrize("phase", [Phase.EXTEND, Phase.DECODE], ids=lambda phase: phase.value)
def test_pages_behind_the_window_are_never_read(phase: Phase) -> None:
    made = case([(1, 60), (1, 33), (1, 16)], phase=phase, page_size=4)
    layer = LayerInfo(index=0, group=0, scale=0.25, window=9)
    before, _ = attend(made, layer)
    table = made.step.page_tables[0].clone()
    for row, context in enumerate((60, 33, 16)):
        behind = (context - 9) // 4
        made.pool[table[row, :behind].long()] = math.nan
        table[row, :behind] = 0
    made.pool[0] = 0.0
    after, _ = attend(evolve(made, step=evolve(made.step, page_tables=(table,))), layer)
    assert torch.equal(before, after)


@pytest.mark.parametrize("phase", list(Phase), ids=lambda phase: phase.value)
def test_a_region_is_one_large_page(phase: Phase) -> None:
    rows = [(1 if phase is Phase.DECODE else 7, 7), (1 if phase is Phase.DECODE else 90, 90)]
    made = case(rows, phase=phase, page_size=512)
    assert made.step.page_tables[0].count_nonzero() == len(rows)
    check(made, LayerInfo(index=0, group=0, scale=0.25))


def test_plans_interleave_and_serve_several_layers() -> None:
    extend = case([(5, 20), (3, 3)], phase=Phase.EXTEND)
    one_query = np.ones(2, np.int32)
    start = torch.arange(3, dtype=torch.int32)
    step = evolve(extend.step, phase=Phase.DECODE, query_start=start, host_query_lens=one_query)
    made = (extend, evolve(extend, step=step, q=extend.q[:2]))
    one = backend(extend.pool, extend.pool.flip(3), heads=4)
    plans = [one.plan(each.step) for each in made]
    for index in (0, 1):
        layer = LayerInfo(index=index, group=0, scale=0.25)
        for plan, each in zip(plans, made, strict=True):
            out = torch.empty_like(each.q)
            one.forward(each.q, layer, plan, out)
            keys, values = (
                tuple(side.flip(1) if index else side for side in sides) for sides in (each.keys, each.values)
            )
            answer, _ = expected(evolve(each, keys=keys, values=values), layer)
            torch.testing.assert_close(out.double(), answer, atol=2e-5, rtol=2e-5)


def test_a_layer_reads_the_page_table_of_its_group() -> None:
    made = case([(1, 20), (1, 9)], phase=Phase.DECODE)
    table = made.step.page_tables[0]
    one = backend(made.pool, heads=4)
    plan = one.plan(evolve(made.step, page_tables=(torch.zeros_like(table), table)))
    out = torch.empty_like(made.q)
    for group in (0, 1):
        layer = LayerInfo(index=0, group=group, scale=0.25)
        one.forward(made.q, layer, plan, out)
    torch.testing.assert_close(out.double(), expected(made, layer)[0], atol=2e-5, rtol=2e-5)


def test_queries_may_be_a_view_and_gradients_off() -> None:
    made = case([(1, 20), (1, 9)], phase=Phase.DECODE)
    wide = torch.cat([made.q, made.q], -1)
    with torch.inference_mode():
        check(evolve(made, q=wide[..., :16]), LayerInfo(index=0, group=0, scale=0.25))


def test_nothing_is_held_between_steps() -> None:
    one = backend(case([(1, 1)], phase=Phase.DECODE).pool, heads=4)
    assert one.memory_bytes() == 0
    one.close()
    assert not one.pools
