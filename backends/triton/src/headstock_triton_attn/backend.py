"""Attention over the paged pool by this plugin's kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor
from triton.runtime import driver

from headstock.nn.attention.device import count_processors
from headstock.nn.attention.paged_plan import PagedPlan
from headstock.nn.attention.static_rows import StaticRows
from headstock.spi import (
    AttentionBackend,
    AttentionContext,
    AttentionStep,
    FullKV,
    GroupQuery,
    LayerInfo,
)
from headstock_triton_attn.launch import Launch, Parts, attend_rows
from headstock_triton_attn.tiles import (
    SMALL_SHARED,
    Tile,
    choose_prompt_tile,
    choose_split_tile,
    choose_splits,
)

FEW_QUERIES = 16
"""Queries of a row up to which a step with prompts reads keys in parts, as a decode step does.

Those that verify drafts have so many.
"""
BLOCK_QUERIES = 8
"""Queries of such a row that a program takes, if there is room."""


@frozen(kw_only=True)
class Launches:
    """How the layers of a KV group are cut, by the kind of a step.

    few: for up to `FEW_QUERIES` queries a row
    """

    prompt: Launch
    few: Launch
    decode: Launch

    def choose(self, plan: PagedPlan) -> Launch:
        """The one for a step; it depends on what a graph keeps alone."""
        if plan.is_decode:
            return self.decode
        return self.few if plan.max_query_len <= FEW_QUERIES else self.prompt


class TritonBackend(AttentionBackend):
    """One kernel for every phase and KV group; what a launch depends on is known on the host."""

    def __init__(self, context: AttentionContext) -> None:
        """Choose how each group's attention is cut, and allocate room for parts to be merged."""
        self.device = context.device
        self.page_size = context.page_size
        self.pools = dict(context.pools)
        self.launches = [make_launches(group, context) for group in context.query.groups]
        self.parts = Parts.new(
            [launch for each in self.launches for launch in (each.few, each.decode)],
            context.query.max_rows,
            context.device,
        )
        self.static: StaticRows | None = None

    def plan(self, step: AttentionStep) -> PagedPlan:
        """The step's own tensors."""
        return PagedPlan.of(step)

    def forward(
        self, q: Tensor, layer: LayerInfo, plan: PagedPlan, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Write causal attention of the step's queries over their rows' pages to `out`.

        q: [tokens, heads, head_dim]
        writes: out [tokens, heads, head_dim]; lse [tokens, heads] float32, natural logarithm,
            without sinks
        """
        launch = self.launches[layer.group].choose(plan)
        attend_rows(q, self.pools[layer.index], plan, layer, out, lse, launch, self.parts)

    def graph_init(self, buckets: Sequence[int], max_seq_len: int) -> None:
        """Allocate buffers for the largest bucket, which the others share."""
        self.static = StaticRows.new(max(buckets), max_seq_len, self.page_size, self.device)

    def graph_plan(self, bucket: int, step: AttentionStep) -> PagedPlan:
        """A plan over the first `bucket` rows of the static buffers, holding the step."""
        assert self.static is not None, "graph_init comes first"
        plan = self.plan(self.static.step(bucket, len(step.page_tables)))
        self.graph_update(plan, step)
        return plan

    def graph_update(self, plan: PagedPlan, step: AttentionStep) -> None:
        """Write the step to the plan's buffers, at the same addresses."""
        assert self.static is not None, "graph_init comes first"
        self.static.write(plan.num_rows, step)

    def capture_plan(self, step: AttentionStep) -> PagedPlan:
        """The step's own tensors: a launch depends on the numbers of tokens and rows alone."""
        return self.plan(step)

    def close(self) -> None:
        """Forget the pools and the buffers."""
        self.pools, self.static = {}, None
        self.parts = Parts.new((), 0, self.device)


def make_launches(group: GroupQuery, context: AttentionContext) -> Launches:
    """How the layers of a KV group are cut."""
    assert isinstance(group.layout, FullKV), group.layout
    kv_heads, head_dim = group.layout.kv_heads, group.layout.k_dim
    ratio = group.heads // kv_heads
    itemsize = getattr(torch, group.q_dtype).itemsize
    shared = find_shared_memory(context.device)
    shape = {"ratio": ratio, "head_dim": head_dim, "itemsize": itemsize, "shared": shared}

    def make(tile: Tile, splits: int) -> Launch:
        return Launch(tile=tile, splits=splits, kv_heads=kv_heads, ratio=ratio, head_dim=head_dim)

    def make_split(queries: int) -> Launch:
        tile = choose_split_tile(queries=queries, **shape)
        splits = choose_splits(
            kv_heads=kv_heads,
            ratio=ratio,
            tile=tile,
            max_seq_len=context.query.max_seq_len,
            processors=count_processors(context.device),
        )
        return make(tile, splits)

    return Launches(
        prompt=make(choose_prompt_tile(**shape), 1),
        few=make_split(BLOCK_QUERIES),
        decode=make_split(1),
    )


def find_shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may have; the least of all GPUs where there is none."""
    if device.type != "cuda":
        return SMALL_SHARED
    index = torch.cuda.current_device() if device.index is None else device.index
    # What Triton compares a kernel with at its first launch.
    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])
