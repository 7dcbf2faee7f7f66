"""FlashInfer over latent vectors (multi-head latent attention), each step planned on the host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import torch
from attrs import evolve, frozen
from torch import Tensor

from headstock.spi import (
    AttentionBackend,
    AttentionContext,
    AttentionStep,
    LatentKV,
    LayerInfo,
)
from headstock.spi.arrays import Ints
from headstock_fi.arrays import pad_lens, page_arrays, table_places
from headstock_fi.backend import COMPILER, INT_WORKSPACE
from headstock_fi.staging import TURNS, Ring, StagedWrapper


@frozen(eq=False)
class LatentPlan:
    """A planned step: one wrapper per KV group, with the turn in which it was planned."""

    wrappers: tuple[StagedWrapper, ...]
    turns: tuple[int, ...]


class LatentBackend(AttentionBackend):
    """One kernel for all phases: ragged queries, each of which sees the tokens up to its own.

    Two wrappers per KV group alternate, so that a step can be planned while the previous one
    computes.
    """

    def __init__(self, context: AttentionContext) -> None:
        """Allocate the workspace and compile missing kernels.

        raises: ValueError when layers differ in their scale, or the kernels cannot be compiled
        """
        query, group = context.query, context.query.groups[0]
        layout = group.layout
        assert isinstance(layout, LatentKV), layout
        self.device = context.device
        self.page_size = context.page_size
        self.max_rows = query.max_rows
        self.columns = -(-query.max_seq_len // context.page_size)
        # The library takes the two parts as two arrays of any strides: nothing is copied.
        self.rank = layout.out_dim
        self.pools = {
            index: (layer.latent[..., : self.rank], layer.latent[..., self.rank :])
            for index, layer in context.kv.items()
            if layer.latent is not None
        }
        self.arguments: dict[str, Any] = {
            "num_heads": group.heads,
            "head_dim_ckv": layout.out_dim,
            "head_dim_kpe": layout.rope_dim,
            "page_size": context.page_size,
            "causal": True,
            "sm_scale": _find_scale(context.layers.values()),
            "q_data_type": getattr(torch, group.q_dtype),
            "kv_data_type": getattr(torch, group.kv_dtype),
        }
        self.make: Any = import_module("flashinfer.mla").BatchMLAPagedAttentionWrapper
        self.workspace = torch.zeros(
            context.options.workspace_mb << 20, dtype=torch.uint8, device=context.device
        )
        self.rings: dict[int, Ring] = {}
        self.buckets: dict[tuple[int, int], StagedWrapper] = {}
        self.static_pages: dict[int, Tensor] = {}
        self.warm_up(next(iter(context.layers.values())), group.heads, layout.dim)

    def warm_up(self, layer: LayerInfo, heads: int, dim: int) -> None:
        """Run one token on the dummy page, which compiles the kernel.

        raises: ValueError when it cannot be compiled or loaded
        """
        dtype = self.arguments["q_data_type"]
        q = torch.zeros((1, heads, dim), dtype=dtype, device=self.device)
        one = np.ones(1, np.int32)
        tables = [torch.zeros((1, 1), dtype=torch.int32, device=self.device)] * (layer.group + 1)
        try:
            self.forward(q, layer, self.bind(tables, one, one), layer.empty_output(q))
        # Also a RuntimeError, but not caused by compilers.
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, OSError) as error:
            output = " ".join(str(error).split())[-600:]
            raise ValueError(
                f"FlashInfer cannot compile or load its kernels: {output}; {COMPILER}"
            ) from error

    def ring(self, group: int) -> Ring:
        """The wrappers of a KV group, made at first use."""
        if group not in self.rings:
            self.rings[group] = Ring(
                [
                    StagedWrapper(
                        self.make(self.workspace), self.max_rows, self.columns, self.device
                    )
                    for _ in range(TURNS)
                ]
            )
        return self.rings[group]

    def plan(self, step: AttentionStep) -> LatentPlan:
        """The step planned for each KV group, from the lengths on the host."""
        return self.bind(step.page_tables, step.host_query_lens, step.host_context_lens)

    def bind(self, tables: Iterable[Tensor], query_lens: Ints, context_lens: Ints) -> LatentPlan:
        """Plan rows of these lengths, with their pages in the tables."""
        # Whole lengths, unlike the other kernels, which take those of the last pages.
        arrays = page_arrays(query_lens, context_lens, self.page_size)
        arrays = evolve(arrays, last_page_lens=context_lens.astype(np.int32))
        wrappers = []
        for group, page_table in enumerate(tables):
            staged = self.ring(group).next_wrapper()
            staged.begin()
            query_start, page_start, lens = staged.stage(arrays)
            places = table_places(arrays.page_start, page_table.shape[1])
            staged.wrapper.plan(
                qo_indptr=query_start,
                kv_indptr=page_start,
                kv_indices=staged.pages(page_table, places),
                kv_len_arr=lens,
                **self.arguments,
            )
            staged.end()
            wrappers.append(staged)
        return LatentPlan(tuple(wrappers), tuple(staged.turn for staged in wrappers))

    def forward(
        self, q: Tensor, layer: LayerInfo, plan: LatentPlan, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Write causal attention of the step's queries over their rows' pages to `out`.

        q: [tokens, heads, rank + rope_dim]
        writes: out [tokens, heads, rank]
        raises: RuntimeError when later plans have overwritten this one
        """
        assert lse is None, "LSE is not supported for latent vectors"
        staged = plan.wrappers[layer.group]
        if staged.turn != plan.turns[layer.group]:
            raise RuntimeError(
                f"this plan was overwritten: only the last {TURNS} plans of a kind are kept"
            )
        latent, turned = self.pools[layer.index]
        staged.wrapper.run(
            q_nope=q[..., : self.rank],
            q_pe=q[..., self.rank :],
            ckv_cache=latent,
            kpe_cache=turned,
            out=out,
        )

    def graph_init(self, buckets: Sequence[int], max_seq_len: int) -> None:
        """Make room for graphs of these sizes; a bucket's wrapper is made at its first plan."""
        self.columns = max(self.columns, -(-max_seq_len // self.page_size))
        self.max_rows = max(self.max_rows, *buckets)

    def graph_plan(self, bucket: int, step: AttentionStep) -> LatentPlan:
        """The step planned in the static buffers of a bucket; its rows may be fewer."""
        wrappers = tuple(self.bucket(bucket, group) for group in range(len(step.page_tables)))
        plan = LatentPlan(wrappers, tuple(staged.turn for staged in wrappers))
        self.graph_update(plan, step)
        return plan

    def bucket(self, rows: int, group: int) -> StagedWrapper:
        """The wrapper for graphs of `bucket` rows. Buckets of a group share the list of pages."""
        if (rows, group) not in self.buckets:
            # Shared, as no two graphs run at the same time: a list for the longest rows is large.
            if group not in self.static_pages:
                self.static_pages[group] = self.zeros(self.max_rows * self.columns)
            pages = self.static_pages[group][: rows * self.columns]
            static = (self.zeros(rows + 1), pages, self.zeros(rows))
            wrapper = self.make(
                self.workspace,
                use_cuda_graph=True,
                qo_indptr=self.zeros(rows + 1),
                kv_indptr=static[0],
                kv_indices=pages,
                kv_len_arr=static[2],
            )
            self.buckets[rows, group] = StagedWrapper(
                wrapper, rows, self.columns, self.device, static
            )
        return self.buckets[rows, group]

    def zeros(self, size: int) -> Tensor:
        """Numbers on the device. [size] int32"""
        return torch.zeros(size, dtype=torch.int32, device=self.device)

    def graph_update(self, plan: LatentPlan, step: AttentionStep) -> None:
        """Plan the step in the same buffers; missing rows become one token in the dummy page."""
        for staged, page_table in zip(plan.wrappers, step.page_tables, strict=True):
            # A graph launches the bucket whole: missing rows read one token of the dummy page.
            lens = pad_lens(step.host_context_lens, staged.rows)
            arrays = page_arrays(np.ones_like(lens), lens, self.page_size)
            staged.begin()
            query_start, page_start, all_lens = staged.stage(evolve(arrays, last_page_lens=lens))
            places = table_places(arrays.page_start[: step.num_rows + 1], page_table.shape[1])
            pages = staged.upload(page_table, places, staged.rows - step.num_rows)
            staged.wrapper.plan(
                qo_indptr=query_start,
                kv_indptr=page_start,
                kv_indices=pages,
                kv_len_arr=all_lens,
                **self.arguments,
            )
            staged.end()

    def memory_bytes(self) -> int:
        """The workspaces and the static buffers."""
        wrappers = len(self.buckets) + sum(len(ring.wrappers) for ring in self.rings.values())
        static = sum(pages.nbytes for pages in self.static_pages.values()) + sum(
            12 * rows + 8 for rows, _ in self.buckets
        )
        return self.workspace.nbytes + wrappers * INT_WORKSPACE + static

    def close(self) -> None:
        """Release the pools, the wrappers and their memory."""
        self.pools, self.rings, self.buckets, self.static_pages = {}, {}, {}, {}
        self.workspace = self.workspace.new_empty(0)


def _find_scale(layers: Iterable[LayerInfo]) -> float:
    """The scale of scores, one for all layers of a plan.   raises: ValueError"""
    scales = sorted({layer.scale for layer in layers})
    if len(scales) > 1:
        raise ValueError(
            f"layers scale their scores by {scales[0]} and by {scales[-1]}, and FlashInfer plans "
            "latent attention with one scale; set attn (--attn) to sdpa"
        )
    return scales[0]
