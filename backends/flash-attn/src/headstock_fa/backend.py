"""FlashAttention over the paged pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headstock.spi import AttentionBackend, AttentionContext, AttentionStep, DeviceEnv, LayerInfo, Phase
from headstock_fa import kernels
from headstock_fa.graphs import StaticRows, write
from headstock_fa.providers import Provider, choose, installed
from headstock_fa.step import FlashPlan, splits


class FlashAttentionBackend(AttentionBackend):
    """One kernel for every phase: ragged queries over pages. Nothing is kept between steps but graphs' buffers."""

    def __init__(self, context: AttentionContext, provider: Provider | None = None) -> None:
        """Load `provider`, by default the first one that serves the device.   raises: ValueError when none does"""
        provider = provider or found(context.device)
        self.kernel: kernels.Kernel = getattr(kernels, provider.loader)()
        self.device = context.device
        self.page_size = context.page_size
        self.keys = {layer: pool[:, 0] for layer, pool in context.pools.items()}
        self.values = {layer: pool[:, 1] for layer, pool in context.pools.items()}
        self.kv_heads = context.query.kv_heads
        self.num_splits = context.options.num_splits
        self.processors = processors(context.device)
        self.static: StaticRows | None = None

    def plan(self, step: AttentionStep) -> FlashPlan:
        """The step's own tensors."""
        is_decode = step.phase is Phase.DECODE
        return FlashPlan(
            query_start=step.query_start,
            context_lens=step.context_lens,
            page_tables=step.page_tables,
            max_query_len=step.max_query_len,
            max_context_len=step.max_context_len,
            num_splits=self.splits(step.num_rows) if is_decode else 0,
            is_decode=is_decode,
        )

    def splits(self, rows: int) -> int:
        """In how many parts a decode step of so many rows reads its keys."""
        return self.num_splits or splits(rows, self.kv_heads, self.processors)

    def forward(self, q: Tensor, layer: LayerInfo, plan: FlashPlan, out: Tensor, lse: Tensor | None = None) -> None:
        """Write causal attention of the step's queries over their rows' pages to `out`.

        q: [tokens, heads, head_dim]
        writes: out [tokens, heads, head_dim]; lse [tokens, heads] float32, natural logarithm
        """
        self.kernel(q, self.keys[layer.index], self.values[layer.index], plan, layer, out, lse)

    def graph_init(self, buckets: Sequence[int], max_seq_len: int) -> None:
        """Allocate buffers for the largest bucket, which the others share."""
        self.static = StaticRows.new(max(buckets), max_seq_len, self.page_size, self.device)

    def graph_plan(self, bucket: int, step: AttentionStep) -> FlashPlan:
        """A plan over the static buffers' first `bucket` rows, holding the step; its rows may be fewer."""
        assert self.static is not None, "graph_init comes first"
        plan = self.static.plan(bucket, len(step.page_tables), self.splits(bucket))
        write(plan, step)
        return plan

    def graph_update(self, plan: FlashPlan, step: AttentionStep) -> None:
        """Write the step to the plan's buffers, at the same addresses."""
        write(plan, step)

    def memory_bytes(self) -> int:
        """The static buffers of graphs."""
        if self.static is None:
            return 0
        held = (self.static.query_start, self.static.context_lens, *self.static.page_tables.values())
        return sum(tensor.nbytes for tensor in held)

    def close(self) -> None:
        """Forget the pools and the buffers."""
        self.keys, self.values, self.static = {}, {}, None


def found(device: torch.device) -> Provider:
    """The provider that is used on a device.   raises: ValueError saying why there is none"""
    env = DeviceEnv(device=device.type, capability=torch.cuda.get_device_capability(device))
    provider, passed = choose(installed(), env)
    if provider is None:
        raise ValueError(f"no FlashAttention serves here: {'; '.join(passed)}")
    return provider


def processors(device: torch.device) -> int:
    """How many blocks the device works on at the same time."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
