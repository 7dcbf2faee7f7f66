"""FlashAttention-3 over latent vectors (multi-head latent attention)."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve
from torch import Tensor

from headstock.nn.attention.device import count_processors
from headstock.nn.attention.static_rows import StaticRows
from headstock.spi import (
    AttentionBackend,
    AttentionContext,
    AttentionStep,
    LatentKV,
    LayerInfo,
    Phase,
)
from headstock_fa import kernels
from headstock_fa.backend import FEW_QUERIES, find_provider
from headstock_fa.options import FlashOptions
from headstock_fa.providers import Provider
from headstock_fa.step import FlashPlan, choose_num_splits, choose_prompt_splits

_BLOCK_QUERIES = 64
"""Query heads per block of the kernel; all of them read a token's one vector."""


class LatentBackend(AttentionBackend):
    """One kernel for every phase: ragged queries over pages of latent vectors.

    The library takes a vector in two parts. The position part is its key; the part from which keys
    and values are computed is its value, whose products with `q_v` are added to the scores.
    """

    def __init__(self, context: AttentionContext, provider: Provider | None = None) -> None:
        """Load `provider`, by default the first one that serves the device.

        raises: ValueError when none does
        """
        provider = provider or find_provider(context.device)
        group = context.query.groups[0]
        assert isinstance(group.layout, LatentKV), group.layout
        self.kernel: kernels.Kernel = getattr(kernels, provider.loader)()
        self.device = context.device
        self.page_size = context.page_size
        self.rank = group.layout.out_dim
        # Views of the pool, of one head: nothing is copied.
        pools = {
            index: layer.latent[:, :, None]
            for index, layer in context.kv.items()
            if layer.latent is not None
        }
        self.keys = {index: pool[..., self.rank :] for index, pool in pools.items()}
        self.values = {index: pool[..., : self.rank] for index, pool in pools.items()}
        self.options: FlashOptions = context.options
        self.processors = count_processors(context.device)
        self.heads = group.heads
        self.blocks_per_row = -(-group.heads // _BLOCK_QUERIES)
        self.static: StaticRows | None = None

    def plan(self, step: AttentionStep) -> FlashPlan:
        """The step's own tensors; prompts are read in one part.

        The partial result of a part is 256 KiB per token with 128 heads: 2 GiB for a step of 8,192
        tokens.
        """
        is_short = step.phase is Phase.DECODE or step.max_query_len < FEW_QUERIES
        splits = self.num_splits_for(step.num_rows) if is_short else 1
        return FlashPlan.of(step, num_splits=splits)

    def num_splits_for(self, rows: int) -> int:
        """The number of parts in which a decode step of `rows` rows reads its vectors."""
        return self.options.num_splits or choose_num_splits(
            rows, self.blocks_per_row, self.processors
        )

    def forward(
        self, q: Tensor, layer: LayerInfo, plan: FlashPlan, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Write causal attention of the step's queries over their rows' pages to `out`.

        q: [tokens, heads, rank + rope_dim]
        writes: out [tokens, heads, rank]
        """
        assert lse is None, "LSE is not supported for latent vectors"
        keys, values = self.keys[layer.index], self.values[layer.index]
        self.kernel(
            q[..., self.rank :], keys, values, plan, layer, out, False, q_v=q[..., : self.rank]
        )

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
        """The step's own tensors, like `plan`, but for prompts with long contexts."""
        plan = self.plan(step)
        if step.max_query_len < FEW_QUERIES or self.options.num_splits:
            return plan
        return evolve(plan, num_splits=choose_prompt_splits(step, self.heads * self.rank))

    def memory_bytes(self) -> int:
        """The static buffers of graphs."""
        return 0 if self.static is None else self.static.memory_bytes()

    def close(self) -> None:
        """Forget the pools and the buffers."""
        self.keys, self.values, self.static = {}, {}, None
