"""Several backends over the KV groups of one model, beside one backend over all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

from headstock.execution.attention_router import PhaseRouter
from headstock.execution.grouped_attention import GroupedAttention, GroupPart
from headstock.execution.kv_pools import page_shape, view_layer
from headstock.spi import (
    AttentionBackend,
    AttentionContext,
    AttentionQuery,
    AttentionStep,
    FullKV,
    GroupQuery,
    KVGroup,
    LayerInfo,
    Phase,
    SharedPrefixes,
)
from headstock_sdpa.backend import SdpaBackend
from headstock_sdpa.options import SdpaOptions

GROUPS = (
    KVGroup(layers=(0, 3), layout=FullKV(kv_heads=2, k_dim=8, v_dim=8)),
    KVGroup(layers=(1,), layout=FullKV(kv_heads=1, k_dim=16, v_dim=16)),
    KVGroup(layers=(2,), layout=FullKV(kv_heads=2, k_dim=8, v_dim=8), window=3),
)
LAYERS = {
    0: LayerInfo(index=0, group=0, scale=0.4),
    1: LayerInfo(index=1, group=1, scale=1.0),
    2: LayerInfo(index=2, group=2, scale=0.3, window=3),
    3: LayerInfo(index=3, group=0, scale=0.4, softcap=2.0),
}
PAGE_SIZE, HEADS = 4, 4


def make_backend(tables: Sequence[int]) -> tuple[AttentionBackend, Mapping[int, LayerInfo]]:
    """A backend over these groups, and its layers."""
    layers = {
        index: evolve(layer, group=tables.index(layer.group))
        for index, layer in LAYERS.items()
        if layer.group in tables
    }
    generator = torch.Generator().manual_seed(0)
    drawn = {
        index: torch.randn(
            8, *page_shape(GROUPS[layer.group].layout, PAGE_SIZE), generator=generator
        )
        for index, layer in LAYERS.items()
    }
    pools = {index: drawn[index] for index in layers}
    query = AttentionQuery(
        phases=frozenset(Phase),
        groups=tuple(
            GroupQuery(
                layout=GROUPS[table].layout, heads=HEADS, q_dtype="float32", kv_dtype="float32",
                window=GROUPS[table].window, features=frozenset(),
            )
            for table in tables
        ),
        page_size=PAGE_SIZE, contiguous=False, max_rows=2, max_seq_len=32,
    )  # fmt: skip
    context = AttentionContext(
        query=query, device=torch.device("cpu"), page_size=PAGE_SIZE, layers=layers, pools=pools,
        kv={
            index: view_layer(pool, LAYERS[index].group, GROUPS[LAYERS[index].group], PAGE_SIZE,
                              torch.float32)
            for index, pool in pools.items()
        },
        options=SdpaOptions(),
    )  # fmt: skip
    return SdpaBackend(context), layers


def make_parts() -> list[GroupPart]:
    """A backend for the groups of narrow heads, which are not neighbours, and one for the other."""
    parts = []
    for tables in ((2, 0), (1,)):
        backend, layers = make_backend(tables)
        parts.append(GroupPart(backend=backend, tables=tables, layers=layers))
    return parts


def make_step(queries: Sequence[int], contexts: Sequence[int], phase: Phase) -> AttentionStep:
    """A step of rows whose pages are others in each group."""
    order = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32)
    return AttentionStep(
        phase=phase,
        query_start=torch.tensor([0, *np.cumsum(queries)], dtype=torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        page_tables=(order, order.flip(1), order.flip(0)),
        host_query_lens=np.array(queries, np.int32),
        host_context_lens=np.array(contexts, np.int32),
    )


@pytest.mark.parametrize(
    ("queries", "contexts", "phase"),
    [
        ([5, 3], [5, 3], Phase.PREFILL),
        ([4, 1], [9, 7], Phase.EXTEND),
        ([1, 1], [11, 6], Phase.DECODE),
    ],
)
def test_each_group_has_the_attention_of_one_backend_over_all(
    queries: list[int], contexts: list[int], phase: Phase
) -> None:
    whole, layers = make_backend((0, 1, 2))
    grouped, step = GroupedAttention(make_parts()), make_step(queries, contexts, phase)
    plans = [each.plan(step) for each in (whole, grouped)]
    for index, layer in layers.items():
        q = torch.randn(sum(queries), HEADS, GROUPS[layer.group].layout.k_dim)  # type: ignore[union-attr]
        outs = []
        for backend, plan in zip((whole, grouped), plans, strict=True):
            outs.append((torch.empty_like(q), torch.empty(q.shape[:2])))
            backend.forward(q, layer, plan, *outs[-1])
        for ours, theirs in zip(*outs, strict=True):
            assert torch.equal(ours, theirs), index


class Seen(AttentionBackend):
    """A backend that keeps what it is called with, and needs so many shared tokens."""

    def __init__(self, least: Any = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.least = least

    def plan(self, step: AttentionStep) -> Any:
        self.calls.append(("plan", step))
        return self

    def forward(self, *args: Any, **keywords: Any) -> None:
        raise AssertionError

    def close(self) -> None:
        self.calls.append(("close",))

    @property
    def min_shared_tokens(self) -> Any:
        return self.least

    def graph_init(self, *args: Any) -> None:
        self.calls.append(("graph_init", *args))

    def graph_plan(self, bucket: int, step: AttentionStep) -> Any:
        self.calls.append(("graph_plan", bucket, step))
        return self

    def graph_update(self, plan: Any, step: AttentionStep) -> None:
        assert plan is self
        self.calls.append(("graph_update", step))

    def capture_plan(self, step: AttentionStep) -> Any:
        self.calls.append(("capture_plan", step))
        return self


def join(*backends: AttentionBackend) -> GroupedAttention:
    """Backends of one group each."""
    return GroupedAttention(
        [
            GroupPart(backend=each, tables=(number,), layers={})
            for number, each in enumerate(backends)
        ]
    )


def test_graphs_and_shared_pages_reach_each_backend_with_its_own_tables() -> None:
    first, second = Seen(), Seen()
    grouped, plain = join(first, second), make_step([1, 1], [5, 6], Phase.DECODE)
    shared = SharedPrefixes(prefixes=plain, rest=plain, shared_lens=torch.zeros(2))
    step = evolve(plain, shared=shared)

    grouped.graph_init([1, 2], 32)
    plan = grouped.graph_plan(2, step)
    grouped.graph_update(plan, step)
    assert grouped.capture_plan(step) == (first, second) == plan
    for number, backend in enumerate((first, second)):
        names = [name for name, *_ in backend.calls]
        assert names == ["graph_init", "graph_plan", "graph_update", "capture_plan"]
        for *_, own in backend.calls[1:]:
            for part in (own, own.shared.prefixes, own.shared.rest):
                assert [table.data_ptr() for table in part.page_tables] == [
                    step.page_tables[number].data_ptr()
                ]


@pytest.mark.parametrize(
    ("least", "expected"), [((3, 5), 5), ((3, None), None), ((None, 4), None), ((3, "x"), "x")]
)
def test_sharing_is_worth_it_where_it_is_for_each_backend(least: Any, expected: Any) -> None:
    assert join(*map(Seen, least)).min_shared_tokens == expected


def test_a_backend_in_two_phases_is_closed_once() -> None:
    prompts, decode, both = Seen(), Seen(), Seen()
    PhaseRouter(join(prompts, both), join(decode, both), {}).close()

    assert [each.calls for each in (prompts, decode, both)] == [[("close",)]] * 3
