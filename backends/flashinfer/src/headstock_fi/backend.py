"""FlashInfer over the paged pool."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from headstock.nn.attention.device import count_processors
from headstock.nn.attention.sinks import scale_by_sinks
from headstock.spi import (
    AttentionBackend,
    AttentionContext,
    AttentionQuery,
    AttentionStep,
    FullKV,
    LayerInfo,
    Phase,
)
from headstock_fi.arrays import PageArrays, pad_lens, page_arrays, table_places
from headstock_fi.library import Library, Shape, partial_bytes
from headstock_fi.staging import TURNS, Ring, StagedWrapper

INT_WORKSPACE = 8 << 20
"""Bytes of each wrapper's schedule, on the device and pinned on the host."""
COMPILER = (
    "it needs ninja, and nvcc of a CUDA toolkit (located by CUDA_HOME), or kernels that "
    "come compiled (the package flashinfer-jit-cache); or name another backend by attn (--attn)"
)


@frozen
class Reach:
    """What layers share that are planned together.

    group: their KV group
    window_left: how many tokens before its own one a query sees; -1 for all
    """

    group: int
    window_left: int

    @classmethod
    def of(cls, layer: LayerInfo) -> Reach:
        """That of a layer, whose window counts the query's own token."""
        return cls(layer.group, -1 if layer.window is None else layer.window - 1)


@frozen(eq=False)
class FlashInferPlan:
    """A planned step: one wrapper for each reach, with the turn in which it was planned."""

    wrappers: tuple[StagedWrapper, ...]
    turns: tuple[int, ...]


class FlashInferBackend(AttentionBackend):
    """FlashInfer, each step planned on the host.

    Two wrappers per kind of step and reach alternate, so that a step can be planned while the
    previous one computes.
    """

    def __init__(self, context: AttentionContext) -> None:
        """Allocate the workspace and compile missing kernels.

        raises: ValueError when the device lacks the kernels that the options select, or they cannot
            be compiled
        """
        query, options = context.query, context.options
        group = query.groups[0]  # one shape for all: no mixed groups are claimed
        assert isinstance(group.layout, FullKV), group.layout
        self.device = context.device
        self.pools = dict(context.pools)
        # A plan holds the pages of one group, and one window.
        self.reaches = tuple(dict.fromkeys(Reach.of(each) for each in context.layers.values()))
        self.places = {
            index: self.reaches.index(Reach.of(each)) for index, each in context.layers.items()
        }
        self.page_size = context.page_size
        self.max_rows = query.max_rows
        self.columns = -(-query.max_seq_len // context.page_size)
        self.prefill_backend = _check_prefill_backend(options.prefill, query, context.device)
        self.tensor_cores = options.use_tensor_cores(group.heads // group.layout.kv_heads)
        self.shape = Shape(
            heads=group.heads,
            kv_heads=group.layout.kv_heads,
            head_dim=group.layout.k_dim,
            page_size=context.page_size,
            q_dtype=getattr(torch, group.q_dtype),
            kv_dtype=getattr(torch, group.kv_dtype),
        )
        self.library = Library.load()
        # The size of a graph's partial results follows from rows and heads: 193 MiB for 256 rows of
        # 64 heads over 8. With 128 MiB, the capture of the largest bucket failed.
        room = max(
            options.workspace_mb << 20,
            partial_bytes(self.shape, query.max_rows, count_processors(context.device)),
        )
        # All wrappers share it, since calls of attention run one after the other. Schedules are not
        # shared: one is planned while the previous one is still read.
        self.workspace = torch.zeros(room, dtype=torch.uint8, device=context.device)
        self.rings: dict[tuple[bool, Reach], Ring] = {}
        self.buckets: dict[tuple[int, Reach], StagedWrapper] = {}
        self.static_pages: dict[Reach, Tensor] = {}
        # Compiling may take minutes: now, not in the first step.
        self.warm_up(query.phases)

    def warm_up(self, phases: frozenset[Phase]) -> None:
        """Run each kind of step once.

        raises: ValueError when the kernels cannot be compiled or loaded
        """
        try:
            self.run_once(phases)
        # Also a RuntimeError, but not caused by compilers.
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, OSError) as error:
            output = " ".join(str(error).split())[-600:]
            raise ValueError(
                f"FlashInfer cannot compile or load its kernels: {output}; {COMPILER}"
            ) from error

    def run_once(self, phases: frozenset[Phase]) -> None:
        """Run one token on the dummy page for each kind of step, which compiles the kernels."""
        one = np.ones(1, np.int32)
        page_table = torch.zeros((1, 1), dtype=torch.int32, device=self.device)
        q = torch.zeros(
            (1, self.shape.heads, self.shape.head_dim), dtype=self.shape.q_dtype, device=self.device
        )
        kinds = sorted({phase is Phase.DECODE for phase in phases})
        for is_decode, reach in product(kinds, self.reaches):
            staged = self.ring(is_decode, reach).next_wrapper()
            arrays = page_arrays(one, one, self.page_size)
            self.bind(staged, reach, page_table, arrays, 0 if is_decode else 1)
            self.library.run(
                staged.wrapper, q, next(iter(self.pools.values())), torch.empty_like(q)
            )

    def ring(self, is_decode: bool, reach: Reach) -> Ring:
        """The wrappers for a kind of step and a reach, made at first use."""
        if (is_decode, reach) not in self.rings:
            wrappers = [
                self.library.decode(self.workspace, self.tensor_cores)
                if is_decode
                else self.library.prefill(self.workspace, self.prefill_backend)
                for _ in range(TURNS)
            ]
            self.rings[is_decode, reach] = Ring(
                [self.stage_wrapper(wrapper) for wrapper in wrappers]
            )
        return self.rings[is_decode, reach]

    def stage_wrapper(self, wrapper: object) -> StagedWrapper:
        """A wrapper with staging buffers and room for the maximum number of rows."""
        return StagedWrapper(wrapper, self.max_rows, self.columns, self.device)

    def plan(self, step: AttentionStep) -> FlashInferPlan:
        """The step planned for each reach, from the lengths on the host."""
        is_decode = step.phase is Phase.DECODE
        arrays = page_arrays(step.host_query_lens, step.host_context_lens, self.page_size)
        wrappers = []
        for reach in self.reaches:
            staged, page_table = (
                self.ring(is_decode, reach).next_wrapper(),
                step.page_tables[reach.group],
            )
            self.bind(staged, reach, page_table, arrays, 0 if is_decode else step.max_query_len)
            wrappers.append(staged)
        return FlashInferPlan(tuple(wrappers), tuple(staged.turn for staged in wrappers))

    def bind(
        self,
        staged: StagedWrapper,
        reach: Reach,
        page_table: Tensor,
        arrays: PageArrays,
        max_query_len: int,
    ) -> None:
        """Plan a step in a wrapper; `max_query_len` is 0 for decode."""
        staged.begin()
        query_start, page_start, last_page_lens = staged.stage(arrays)
        pages = staged.pages(page_table, table_places(arrays.page_start, page_table.shape[1]))
        shared = {"window_left": reach.window_left, **self.shape.arguments}
        if max_query_len == 0:
            lists = (page_start, pages, last_page_lens)
            staged.wrapper.plan(*lists, head_dim=self.shape.head_dim, **shared)
        else:
            staged.wrapper.plan(
                query_start,
                page_start,
                pages,
                last_page_lens,
                head_dim_qk=self.shape.head_dim,
                causal=True,
                max_token_per_sequence=max_query_len,
                **shared,
            )
        staged.end()

    def forward(
        self,
        q: Tensor,
        layer: LayerInfo,
        plan: FlashInferPlan,
        out: Tensor,
        lse: Tensor | None = None,
    ) -> None:
        """Write causal attention of the step's queries over their rows' pages to `out`.

        q: [tokens, heads, head_dim]
        writes: out [tokens, heads, head_dim]; lse [tokens, heads] float32, natural logarithm,
            without sinks
        raises: RuntimeError when later plans have overwritten this one
        """
        number = self.places[layer.index]
        staged = plan.wrappers[number]
        if staged.turn != plan.turns[number]:
            raise RuntimeError(
                f"this plan was overwritten: only the last {TURNS} plans of a kind are kept"
            )
        if layer.sinks is not None and lse is None:
            lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        self.library.run(
            staged.wrapper,
            q,
            self.pools[layer.index],
            out,
            lse,
            # Scores are linear in the keys: one number covers both scales.
            layer.scale * layer.k_scale,
            layer.v_scale,
        )
        if layer.sinks is not None:
            assert lse is not None
            scale_by_sinks(out, lse, layer.sinks)

    def graph_init(self, buckets: Sequence[int], max_seq_len: int) -> None:
        """Make room for graphs of these sizes; a bucket's wrapper is made at its first plan."""
        self.columns = max(self.columns, -(-max_seq_len // self.page_size))
        self.max_rows = max(self.max_rows, *buckets)

    def graph_plan(self, bucket: int, step: AttentionStep) -> FlashInferPlan:
        """The step planned in the static buffers of a bucket; its rows may be fewer."""
        wrappers = tuple(self.bucket(bucket, reach) for reach in self.reaches)
        plan = FlashInferPlan(wrappers, tuple(staged.turn for staged in wrappers))
        self.graph_update(plan, step)
        return plan

    def bucket(self, rows: int, reach: Reach) -> StagedWrapper:
        """The wrapper for graphs of `bucket` rows. Buckets of a reach share the list of pages."""
        if (rows, reach) not in self.buckets:
            # Shared, as no two graphs run at the same time: a list for the longest rows is large.
            if reach not in self.static_pages:
                self.static_pages[reach] = self.zeros(self.max_rows * self.columns)
            static = (
                self.zeros(rows + 1),
                self.static_pages[reach][: rows * self.columns],
                self.zeros(rows),
            )
            wrapper = self.library.decode(self.workspace, self.tensor_cores, static)
            staged = self.buckets[rows, reach] = StagedWrapper(
                wrapper, rows, self.columns, self.device, static
            )
            ones, table = np.ones(rows, np.int32), self.zeros(rows).view(rows, 1)
            self.bind(staged, reach, table, page_arrays(ones, ones, self.page_size), 0)
        return self.buckets[rows, reach]

    def zeros(self, size: int) -> Tensor:
        """Numbers on the device. [size] int32"""
        return torch.zeros(size, dtype=torch.int32, device=self.device)

    def graph_update(self, plan: FlashInferPlan, step: AttentionStep) -> None:
        """Plan the step in the same buffers; missing rows become one token in the dummy page."""
        for staged, reach in zip(plan.wrappers, self.reaches, strict=True):
            page_table = step.page_tables[reach.group]
            # A graph launches the bucket whole: missing rows read one token of the dummy page.
            lens = pad_lens(step.host_context_lens, staged.rows)
            arrays = page_arrays(np.ones_like(lens), lens, self.page_size)
            staged.begin()
            _, page_start, last_page_lens = staged.stage(arrays)
            places = table_places(arrays.page_start[: step.num_rows + 1], page_table.shape[1])
            pages = staged.upload(page_table, places, staged.rows - step.num_rows)
            self.library.replan(
                staged.wrapper, page_start, pages, last_page_lens, self.shape, reach.window_left
            )
            staged.end()

    def memory_bytes(self) -> int:
        """The workspaces and the static buffers."""
        # With 23 buckets the wrappers take 184 MiB: more than the workspace has by default.
        wrappers = len(self.buckets) + sum(len(ring.wrappers) for ring in self.rings.values())
        static = sum(pages.nbytes for pages in self.static_pages.values()) + sum(
            8 * rows + 4 for rows, _ in self.buckets
        )
        return self.workspace.nbytes + wrappers * INT_WORKSPACE + static

    def close(self) -> None:
        """Release the pools, the wrappers and their memory."""
        self.pools, self.rings, self.buckets, self.static_pages = {}, {}, {}, {}
        self.workspace = self.workspace.new_empty(0)


def _check_prefill_backend(backend: str, query: AttentionQuery, device: torch.device) -> str:
    """The library's name for the prompt kernels.

    raises: ValueError for fa3 on a GPU other than Hopper, or with 8-bit KV, which fa3 only reads
        with 8-bit queries
    """
    if (
        backend == "fa3"
        and device.type == "cuda"
        and torch.cuda.get_device_capability(device) != (9, 0)
    ):
        raise ValueError("fi.prefill=fa3 needs sm_90; use fi.prefill=auto")
    mixed = [group.kv_dtype for group in query.groups if group.q_dtype != group.kv_dtype]
    if backend == "fa3" and mixed:
        raise ValueError(f"fi.prefill=fa3 does not read {mixed[0]} KV; use fi.prefill=auto")
    return backend
