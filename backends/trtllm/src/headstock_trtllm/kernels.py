"""TensorRT-LLM's functions of each GPU family behind one interface.

q, out: [tokens, heads, head_dim], dense    pool: [pages, 2, page_size, kv_heads, head_dim]
Workspaces are zeroed when they are made, and the kernels leave their counters at zero.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

from headstock.nn.attention.paged_plan import PagedPlan
from headstock.spi import LayerInfo

LAYOUT = "NHD"

PREFILL_WORKSPACE = 1 << 20
"""Bytes: FMHA v2 keeps one tile counter in it."""
DECODE_WORKSPACE = 16 << 20
"""Bytes: XQA keeps semaphores in the first 8 MiB and partial results in the rest.

These are for at most 1.5 blocks per processor, 17 KiB each.
"""
BLACKWELL_WORKSPACE = 128 << 20
"""Bytes, from the library's documentation."""


class Kernels(Protocol):
    """Attention for prompts and for decode.

    Each has its own workspace, whose counters must be zero before a call; the other kernel would
    change them.
    """

    def prefill(
        self, q: Tensor, pool: Tensor, plan: PagedPlan, layer: LayerInfo, out: Tensor
    ) -> None:
        """Attention of rows with any number of queries.   writes: out"""

    def decode(
        self, q: Tensor, pool: Tensor, plan: PagedPlan, layer: LayerInfo, out: Tensor
    ) -> None:
        """Attention of rows with one query each.   writes: out"""

    def memory_bytes(self) -> int:
        """Bytes of the workspaces."""


class Hopper:
    """FMHA v2 and XQA."""

    def __init__(self, device: torch.device) -> None:
        self.fmha: Any = import_module("flashinfer.prefill").trtllm_fmha_v2_prefill
        self.xqa: Any = import_module("flashinfer.decode").xqa_batch_decode_with_kv_cache
        # Two workspaces: FMHA v2 counts tiles in its own, and XQA's semaphores must be zero.
        self.prefill_workspace = _make_workspace(PREFILL_WORKSPACE, device)
        self.decode_workspace = _make_workspace(DECODE_WORKSPACE, device)

    def prefill(
        self, q: Tensor, pool: Tensor, plan: PagedPlan, layer: LayerInfo, out: Tensor
    ) -> None:
        """FMHA v2: causal, aligned at the end of each row's context.   writes: out"""
        # Pages are copied whole: the rest of a last page is multiplied by zero and must be finite.
        # The engine therefore zeroes the pages of failed rows.
        self.fmha(
            (q, pool),
            f"Q_PAGED_KV_{LAYOUT}",
            self.prefill_workspace,
            *_prompt_arguments(plan, layer.scale),
            block_tables=plan.page_tables[layer.group],
            out=out,
            mask_mode="causal",
        )

    def decode(
        self, q: Tensor, pool: Tensor, plan: PagedPlan, layer: LayerInfo, out: Tensor
    ) -> None:
        """XQA: the number of parts of a row depends on the number of rows and the page table's
        width.

        It does not depend on lengths, so a captured launch stays correct.
        writes: out
        """
        # 8-bit KV rounds queries and probabilities to 8 bits too: the largest error was 0.07 on an
        # H200; with bfloat16 it was 0.008.
        self.xqa(
            q,
            pool,
            self.decode_workspace,
            plan.page_tables[layer.group],
            plan.context_lens,
            plan.max_context_len,
            bmm1_scale=layer.scale * layer.k_scale,
            bmm2_scale=layer.v_scale,
            out=out,
            kv_layout=LAYOUT,
        )

    def memory_bytes(self) -> int:
        """Bytes of both workspaces."""
        return self.prefill_workspace.nbytes + self.decode_workspace.nbytes


class Blackwell:
    """The functions of trtllm-gen.

    `max_seq_len` is the same for all decode steps, because sums depend on it.
    """

    def __init__(self, device: torch.device, max_seq_len: int) -> None:
        self.context: Any = import_module("flashinfer.prefill").trtllm_batch_context_with_kv_cache
        self.generation: Any = import_module("flashinfer.decode").trtllm_batch_decode_with_kv_cache
        self.max_seq_len = max_seq_len
        self.workspace = _make_workspace(BLACKWELL_WORKSPACE, device)

    def prefill(
        self, q: Tensor, pool: Tensor, plan: PagedPlan, layer: LayerInfo, out: Tensor
    ) -> None:
        """Attention of prompts, causal.   writes: out"""
        self.context(
            q,
            pool,
            self.workspace,
            plan.page_tables[layer.group],
            *_prompt_arguments(plan, layer.scale),
            out=out,
            kv_layout=LAYOUT,
        )

    def decode(
        self, q: Tensor, pool: Tensor, plan: PagedPlan, layer: LayerInfo, out: Tensor
    ) -> None:
        """Attention of one token per row.   writes: out"""
        self.generation(
            q,
            pool,
            self.workspace,
            plan.page_tables[layer.group],
            plan.context_lens,
            self.max_seq_len,
            bmm1_scale=layer.scale,
            bmm2_scale=1.0,
            out=out,
            kv_layout=LAYOUT,
            backend="trtllm-gen",
        )

    def memory_bytes(self) -> int:
        """Bytes of the workspace."""
        return self.workspace.nbytes


def _prompt_arguments(plan: PagedPlan, scale: float) -> tuple[Any, ...]:
    """The arguments that both functions for prompts share, in order.

    They are lengths, scales of scores and of results, and starts of queries and contexts.
    """
    return (
        plan.context_lens,
        plan.max_query_len,
        plan.max_context_len,
        scale,
        # Values have no scale here: prompts are not supported with 8-bit KV.
        1.0,
        plan.num_rows,
        plan.query_start,
        plan.context_start,
    )


def _make_workspace(size: int, device: torch.device) -> Tensor:
    """A workspace. [size] uint8"""
    return torch.zeros(size, dtype=torch.uint8, device=device)
