"""The launches of the kernels: their grids and constants, and the room for parts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from headstock.nn.attention.paged_plan import PagedPlan
from headstock.spi import LayerInfo
from headstock_triton_attn.kernel import attend_kernel, merge_kernel
from headstock_triton_attn.tiles import LEAST_TOKENS, Tile, pad_head

MOST_PARTS_BYTES = 128 << 20
"""Memory limit of the partial results of a launch; a step with more has several."""
MERGED_NUMBERS = 4096
"""Float32 numbers of parts that a program merges at once: 32 registers for each of its threads."""
MERGED_DIM = 128
"""Numbers of a head that such a program writes: one row of wide heads has more programs then."""


@frozen(kw_only=True)
class Launch:
    """How layers of one shape are cut.

    splits: the most parts of a row's keys; 1 for no parts
    """

    tile: Tile
    splits: int
    kv_heads: int
    ratio: int
    head_dim: int

    @property
    def pairs(self) -> int:
        """Programs of a block of queries: KV heads times what their query heads are cut into."""
        return self.kv_heads * -(-self.ratio // self.tile.group)

    @property
    def slots_a_block(self) -> int:
        """Partial results of a block of queries."""
        return self.pairs * self.splits * self.tile.queries * self.tile.group


@frozen(kw_only=True, eq=False)
class Parts:
    """The partial results of a launch, not yet divided; no two launches use them at once.

    sums: float32, [slots, head_dim] in a launch
    levels: float32, [slots, 2]: the highest score and the sum of weights
    """

    sums: Tensor
    levels: Tensor

    @classmethod
    def new(cls, launches: Iterable[Launch], rows: int, device: torch.device) -> Parts:
        """Room for steps of up to `rows` rows, or for parts of such steps."""
        sums = levels = 0
        for launch in launches:
            blocks = min(rows, count_most_blocks(launch)) if launch.splits > 1 else 0
            sums = max(sums, blocks * launch.slots_a_block * launch.head_dim)
            levels = max(levels, blocks * launch.slots_a_block * 2)
        return cls(sums=torch.empty(sums, device=device), levels=torch.empty(levels, device=device))

    def count_blocks(self, launch: Launch) -> int:
        """How many blocks of queries of such a launch have room."""
        # Both: layers of another head size may have set the one and not the other.
        slots = min(self.sums.numel() // launch.head_dim, self.levels.numel() // 2)
        return slots // launch.slots_a_block


def count_most_blocks(launch: Launch) -> int:
    """How many blocks of queries may have room, one at least."""
    return max(1, MOST_PARTS_BYTES // (4 * launch.slots_a_block * launch.head_dim))


def attend_rows(
    q: Tensor,
    pool: Tensor,
    plan: PagedPlan,
    layer: LayerInfo,
    out: Tensor,
    lse: Tensor | None,
    launch: Launch,
    parts: Parts,
) -> None:
    """Attention of the plan's queries over its rows' pages.

    q: [tokens, heads, head_dim]    pool: [pages, 2, page_size, kv_heads, head_dim]
    writes: out [tokens, heads, head_dim]; lse [tokens, heads] float32, natural logarithm, without
        sinks; parts
    """
    tile, tokens, rows = launch.tile, len(q), plan.num_rows
    # A row's last block may be incomplete.
    blocks = tokens if plan.is_decode else tokens // tile.queries + rows
    if not tokens or not rows:
        return
    is_split = launch.splits > 1
    most = min(blocks, parts.count_blocks(launch)) if is_split else blocks
    keys, values = pool[:, 0], pool[:, 1]
    lens, table = plan.context_lens, plan.page_tables[layer.group]
    shape: dict[str, Any] = {
        "HEADS": q.shape[1],
        "RATIO": launch.ratio,
        "HEAD_DIM": launch.head_dim,
        "DIM": pad_head(launch.head_dim),
        "WINDOW": layer.window or 0,
        "QUERIES": tile.queries,
        "GROUP": tile.group,
        "BLOCK": tile.tokens,
        "SPLITS": launch.splits,
        "LEAST": -(-LEAST_TOKENS // tile.tokens),
        "DECODE": plan.is_decode,
        "LSE": lse is not None,
        "SINKS": layer.sinks is not None,
    }
    some = min(MERGED_DIM, shape["DIM"])
    ends = (plan.query_start, lens)
    sinks = parts.levels if layer.sinks is None else layer.sinks
    sums = (out if lse is None else lse, parts.sums, parts.levels)
    for first in range(0, blocks, most):
        count = min(most, blocks - first)
        attend_kernel[(count, launch.pairs, launch.splits)](
            q,
            keys,
            values,
            *ends,
            table,
            sinks,
            out,
            *sums,
            layer.scale * layer.k_scale,
            layer.v_scale,
            first,
            rows,
            table.stride(0),
            *keys.stride()[:3],
            *q.stride()[:2],
            *out.stride()[:2],
            **shape,
            PAGE=keys.shape[1],
            SOFTCAP=layer.softcap,
            WIDTH=tile.width,
            STAGES=tile.stages,
            num_warps=tile.warps,
        )
        if is_split:
            merge_kernel[(count, launch.pairs, tile.queries * tile.group * (shape["DIM"] // some))](
                *ends,
                sinks,
                out,
                *sums,
                layer.v_scale,
                first,
                rows,
                *out.stride()[:2],
                **shape,
                MERGED=min(launch.splits, MERGED_NUMBERS // some),
                SOME=some,
            )
