"""FlashAttention over the paged pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import evolve
from torch import Tensor

from headstock.nn.attention.device import count_processors
from headstock.nn.attention.static_rows import StaticRows
from headstock.spi import (
    AttentionBackend,
    AttentionContext,
    AttentionStep,
    DeviceEnv,
    LayerInfo,
    Phase,
)
from headstock_fa import kernels
from headstock_fa.providers import REQUIRE, Provider, choose_provider, installed_versions
from headstock_fa.step import FlashPlan, choose_num_splits

EIGHT_BIT = "float8_e4m3fn"


class FlashAttentionBackend(AttentionBackend):
    """One kernel for every phase: ragged queries over pages.

    Nothing outlives a step but the static buffers of graphs.
    """

    def __init__(self, context: AttentionContext, provider: Provider | None = None) -> None:
        """Load `provider`, by default the first one that serves the device.

        raises: ValueError when none does
        """
        provider = provider or _find_provider(context.device)
        self.kernel: kernels.Kernel = getattr(kernels, provider.loader)()
        self.device = context.device
        self.page_size = context.page_size
        # The library takes keys and values as two tensors. These are views of the pool: nothing is
        # copied.
        self.keys = {layer: pool[:, 0] for layer, pool in context.pools.items()}
        self.values = {layer: pool[:, 1] for layer, pool in context.pools.items()}
        self.eight_bit = context.query.kv_dtype == EIGHT_BIT
        self.kv_heads = context.query.kv_heads
        self.num_splits = context.options.num_splits
        self.processors = count_processors(context.device)
        self.static: StaticRows | None = None

    def plan(self, step: AttentionStep) -> FlashPlan:
        """The step's own tensors."""
        # Prompts leave the number to the library. It bounds it as if the longest row were the only
        # one; one split where a step has many tokens was not tried.
        return FlashPlan.of(
            step, num_splits=self.num_splits_for(step.num_rows) if step.phase is Phase.DECODE else 0
        )

    def num_splits_for(self, rows: int) -> int:
        """In how many parts a decode step of so many rows reads its keys."""
        return self.num_splits or choose_num_splits(rows, self.kv_heads, self.processors)

    def forward(
        self, q: Tensor, layer: LayerInfo, plan: FlashPlan, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Write causal attention of the step's queries over their rows' pages to `out`.

        q: [tokens, heads, head_dim]
        writes: out [tokens, heads, head_dim]; lse [tokens, heads] float32, natural logarithm
        """
        if self.eight_bit:
            # Scores are linear in the keys and results in the values, so a layer's two scales go
            # into the scale of scores and into the result.
            q, layer = _quantize_queries(q), evolve(layer, scale=layer.scale * layer.k_scale)
        self.kernel(q, self.keys[layer.index], self.values[layer.index], plan, layer, out, lse)
        if self.eight_bit and layer.v_scale != 1.0:
            out.mul_(layer.v_scale)

    def graph_init(self, buckets: Sequence[int], max_seq_len: int) -> None:
        """Allocate buffers for the largest bucket, which the others share."""
        self.static = StaticRows.new(max(buckets), max_seq_len, self.page_size, self.device)

    def graph_plan(self, bucket: int, step: AttentionStep) -> FlashPlan:
        """A plan over the first `bucket` rows of the static buffers, holding the step."""
        assert self.static is not None, "graph_init comes first"
        plan = self.plan(self.static.step(bucket, len(step.page_tables)))
        self.graph_update(plan, step)
        return plan

    def graph_update(self, plan: FlashPlan, step: AttentionStep) -> None:
        """Write the step to the plan's buffers, at the same addresses."""
        assert self.static is not None, "graph_init comes first"
        self.static.write(plan.num_rows, step)

    def capture_plan(self, step: AttentionStep) -> FlashPlan:
        """The step's own tensors.

        Keys are read in one part: more cost 165 us a step of short rows (28 layers).
        """
        return FlashPlan.of(step, num_splits=self.num_splits or 1)

    def memory_bytes(self) -> int:
        """The static buffers of graphs."""
        return 0 if self.static is None else self.static.memory_bytes()

    def close(self) -> None:
        """Forget the pools and the buffers."""
        self.keys, self.values, self.static = {}, {}, None


def _quantize_queries(q: Tensor) -> Tensor:
    """The queries in the 8-bit type of the KV, which the library needs; large ones saturate."""
    most = torch.finfo(torch.float8_e4m3fn).max
    # The conversion by itself does not saturate.
    return q.clamp(-most, most).to(torch.float8_e4m3fn)


def _find_provider(device: torch.device) -> Provider:
    """The provider that is used on a device.

    raises: ValueError with why there is none and what helps
    """
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    provider, rejections = choose_provider(
        DeviceEnv(device=device.type, capability=capability, distributions=installed_versions())
    )
    if provider is None:
        raise ValueError(
            f"no FlashAttention serves here: {'; '.join(rejections)}; {REQUIRE.hint}, or use "
            "--attn fi"
        )
    return provider
