"""FlashInfer's wrappers behind one interface for all supported versions."""

from __future__ import annotations

import inspect
import math
from importlib import import_module
from typing import Any

from attrs import frozen
from torch import Tensor

LAYOUT = "NHD"
"""The pool is [pages, 2, page_size, kv_heads, head_dim]."""


@frozen(kw_only=True)
class Shape:
    """The settings that all plans of a backend share. The types are torch's."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    q_dtype: Any
    kv_dtype: Any

    @property
    def arguments(self) -> dict[str, Any]:
        """As keyword arguments of a plan. The scale is 1: each layer passes its own to `run`."""
        return {
            "num_qo_heads": self.heads,
            "num_kv_heads": self.kv_heads,
            "page_size": self.page_size,
            "q_data_type": self.q_dtype,
            "kv_data_type": self.kv_dtype,
            "o_data_type": self.q_dtype,
            "sm_scale": 1.0,
        }


def partial_bytes(shape: Shape, rows: int, processors: int) -> int:
    """The maximum bytes of partial results.

    FlashInfer 0.6 keeps a whole tile of queries, in float32, for each part.

    Rows are cut into at most two parts per processor. In a graph the library treats queries as
    ragged, so each of `rows` rows is at least one tile.
    """
    ratio, most = shape.heads // shape.kv_heads, 64 if shape.head_dim >= 256 else 128
    tile = next(size for size in (16, 64, most) if ratio <= size or size == most)
    parts = 2 * processors // shape.kv_heads
    replayed = max(parts, -(-rows * ratio // tile) + rows - 1)
    return shape.heads * max(parts * most, replayed * tile) * (shape.head_dim + 1) * 4


@frozen(eq=False)
class Library:
    """FlashInfer as it is installed.

    plan_again: plans decode in a graph's wrapper
    has_lse_base: whether prompts can return natural logarithms (0.7 and later)
    """

    prefill_class: Any
    decode_class: Any
    plan_again: Any
    has_lse_base: bool

    @classmethod
    def load(cls) -> Library:
        """The installed FlashInfer; its signature is inspected here, once."""
        module: Any = import_module("flashinfer")
        decode: Any = import_module("flashinfer.decode")
        prefill = module.BatchPrefillWithPagedKVCacheWrapper
        has_lse_base = "lse_base" in inspect.signature(prefill.run).parameters
        return cls(
            prefill,
            module.BatchDecodeWithPagedKVCacheWrapper,
            decode.fast_decode_plan,
            has_lse_base,
        )

    def prefill(self, workspace: Tensor, backend: str) -> Any:
        """A wrapper for prompts."""
        # On an H200, 16 prompts of 1,024 tokens take 266 us with the fa2 templates and 184 with
        # fa3.
        return self.prefill_class(workspace, LAYOUT, backend=backend)

    def decode(
        self, workspace: Tensor, tensor_cores: bool, graph_buffers: tuple[Tensor, ...] = ()
    ) -> Any:
        """A wrapper for decode; for a graph if given (page_start, pages, last_page_lens)."""
        names = (
            "paged_kv_indptr_buffer",
            "paged_kv_indices_buffer",
            "paged_kv_last_page_len_buffer",
        )
        static = dict(zip(names, graph_buffers, strict=True)) if graph_buffers else {}
        return self.decode_class(
            workspace,
            LAYOUT,
            use_cuda_graph=bool(graph_buffers),
            use_tensor_cores=tensor_cores,
            **static,
        )

    def replan(
        self,
        wrapper: Any,
        page_start: Tensor,
        pages: Tensor,
        last_page_len: Tensor,
        shape: Shape,
        window_left: int,
    ) -> None:
        """Plan another step in a graph's wrapper; its static buffers hold the step already.

        The wrapper's own `plan` copies between buffers and searches the longest row in a Python
        loop. For 256 rows that takes 500 us on an H200's host.
        page_start: [rows + 1], last_page_len: [rows] int32, on the host
        pages: [pages] int32, the static buffer's
        window_left: as its first plan had it
        """
        self.plan_again(
            wrapper,
            page_start,
            pages,
            last_page_len,
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            shape.page_size,
            window_left=window_left,
            q_data_type=shape.q_dtype,
            kv_data_type=shape.kv_dtype,
            sm_scale=1.0,
            global_override_indptr_cpu=page_start,
        )

    def run(
        self,
        wrapper: Any,
        q: Tensor,
        pool: Tensor,
        out: Tensor,
        lse: Tensor | None = None,
        scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        """Attention as the wrapper was planned, with this scale of scores and of values.

        writes: out [tokens, heads, head_dim]; lse [tokens, heads] float32, natural logarithm,
            unless None
        """
        # The library multiplies the result by the scale of values, after the kernel.
        scales = {"q_scale": scale, "v_scale": None if v_scale == 1.0 else v_scale}
        if lse is None:
            wrapper.run(q, pool, out=out, **scales)
        elif self.has_lse_base and isinstance(wrapper, self.prefill_class):
            wrapper.run(q, pool, out=out, lse=lse, return_lse=True, lse_base="ln", **scales)
        else:
            wrapper.run(q, pool, out=out, lse=lse, return_lse=True, **scales)
            lse.mul_(math.log(2))  # the library's are binary logarithms
