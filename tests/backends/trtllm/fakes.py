"""The library's functions with the signatures of 0.6.18.post1, written in torch, for machines
without a GPU.

Like the kernels, they address dense tensors only, keep counters in their workspaces, and leave them
as the next call of the same function needs them.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from headstock_conformance.attention import row_attention
from headstock_conformance.model.paged import gather_kv

SEMAPHORES = 8 << 20


def attention(
    q: Tensor,
    pool: Tensor,
    page_table: Tensor,
    query_start: list[int],
    context_lens: Tensor,
    scale: float,
) -> Tensor:
    """Causal attention over pages in float64. [tokens, heads, head_dim]"""
    assert page_table.dtype == context_lens.dtype == torch.int32
    assert (
        q.is_contiguous()
        and pool.is_contiguous()
        and page_table.is_contiguous()
        and context_lens.is_contiguous()
    )
    assert page_table.ndim == 2 and len(page_table) == len(context_lens) == len(query_start) - 1
    page_size = pool.shape[2]
    assert pool.shape[1] == 2 and page_size in (16, 32, 64, 128)
    answers = []
    for row, context in enumerate(context_lens.tolist()):
        keys, values = gather_kv(pool, page_table[row, : -(-context // page_size)].long(), context)
        queries = q[query_start[row] : query_start[row + 1]]
        answers.append(row_attention(queries, keys.float(), values.float(), scale)[0])
    return torch.cat(answers)


def prompt(
    q: Tensor,
    pool: Tensor,
    page_table: Tensor,
    lens: Tensor,
    most: tuple[int, int],
    rows: int,
    starts: tuple[Any, ...],
) -> tuple[Tensor, list[int]]:
    """What both prompt functions check; the queries and where each row's start."""
    query_start, context_start = (start.tolist() for start in starts)
    assert {start.dtype for start in starts} == {torch.int32}
    assert rows == len(lens) and len(q) == query_start[-1]
    assert [b - a for a, b in pairwise(context_start)] == lens.tolist()
    assert most == (max(b - a for a, b in pairwise(query_start)), int(lens.max()))
    return q, query_start


def trtllm_fmha_v2_prefill(
    qkv, input_layout, workspace_buffer, seq_lens, max_q_len, max_kv_len, bmm1_scale, bmm2_scale,
    batch_size,
    cum_seq_lens_q, cum_seq_lens_kv, block_tables=None, out=None, out_dtype=None, sinks=None,
    pos_encoding_mode=None,
    logits_soft_cap_scale=None, mask_mode="causal", window_left=-1, chunked_attention_size=0,
    save_softmax_stats=False, skip_softmax_threshold_scale_factor=0,
) -> Any:  # fmt: skip
    """FMHA v2. Its counter of tiles is the first word of the workspace, which each call sets
    anew.
    """
    q, pool = qkv
    assert input_layout == "Q_PAGED_KV_NHD" and mask_mode == "causal" and window_left == -1
    assert q.dtype == pool.dtype == out.dtype == torch.bfloat16 and out.is_contiguous()
    q, query_start = prompt(
        q,
        pool,
        block_tables,
        seq_lens,
        (max_q_len, max_kv_len),
        batch_size,
        (cum_seq_lens_q, cum_seq_lens_kv),
    )
    workspace_buffer[:4] = 77
    out.copy_(attention(q, pool, block_tables, query_start, seq_lens, bmm1_scale) * bmm2_scale)
    return out


def xqa_batch_decode_with_kv_cache(
    query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale=1.0,
    bmm2_scale=1.0,
    window_left=-1, out=None, sinks=None, kv_layout="NHD", enable_pdl=None, q_len_per_req=1,
    o_scale=1.0, mask=None,
    kv_cache_sf=None, q_cu_seq_lens=None,
) -> Tensor:  # fmt: skip
    """XQA. Semaphores come first and must be zero whenever it is called."""
    assert kv_layout == "NHD" and window_left == -1 and q_len_per_req == 1
    assert workspace_buffer.dtype == torch.uint8 and not workspace_buffer[:SEMAPHORES].any()
    assert query.dtype == out.dtype and out.is_contiguous()
    assert (query.shape[1] // kv_cache.shape[3]) <= 32
    workspace_buffer[SEMAPHORES : SEMAPHORES + 1000] = 99  # partial results
    rows = list(range(len(query) + 1))
    out.copy_(attention(query, kv_cache, block_tables, rows, seq_lens, bmm1_scale) * bmm2_scale)
    return out


def trtllm_batch_context_with_kv_cache(
    query, kv_cache, workspace_buffer, block_tables, seq_lens, max_q_len, max_kv_len, bmm1_scale,
    bmm2_scale,
    batch_size, cum_seq_lens_q, cum_seq_lens_kv, window_left=-1, out=None, out_dtype=None,
    o_sf_scale=None,
    o_sf_vec_size=None, kv_layout="HND", enable_pdl=None, sinks=None, kv_cache_sf=None,
    skip_softmax_threshold_scale_factor=None, uses_shared_paged_kv_idx=True, causal=True, lse=None,
    return_lse=False,
    multi_ctas_kv_counter_buffer=None, use_fp16_softmax=None, uses_spcompress=None,
) -> Tensor:  # fmt: skip
    """trtllm-gen for prompts."""
    assert (
        kv_layout == "NHD"
        and causal
        and window_left == -1
        and out.dtype == query.dtype == kv_cache.dtype
    )
    q, query_start = prompt(
        query,
        kv_cache,
        block_tables,
        seq_lens,
        (max_q_len, max_kv_len),
        batch_size,
        (cum_seq_lens_q, cum_seq_lens_kv),
    )
    out.copy_(attention(q, kv_cache, block_tables, query_start, seq_lens, bmm1_scale) * bmm2_scale)
    return out


def trtllm_batch_decode_with_kv_cache(
    query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale=1.0,
    bmm2_scale=1.0,
    window_left=-1, out=None, out_dtype=None, o_sf_scale=None, o_sf_vec_size=None, sinks=None,
    kv_layout="HND",
    enable_pdl=None, backend="auto", q_len_per_req=1, o_scale=1.0, mask=None, max_q_len=None,
    cum_seq_lens_q=None,
    skip_softmax_threshold_scale_factor=None, kv_cache_sf=None, uses_shared_paged_kv_idx=True,
    lse=None,
    return_lse=False, bmm1_scale_log2=None, multi_ctas_kv_counter_buffer=None,
    enable_block_sparse_attention=False,
    bf16q_fp8kv_transform_mode=None,
) -> Tensor:  # fmt: skip
    """trtllm-gen for decode, whose sums depend on `max_seq_len`: it must be one number for all
    steps.
    """
    assert (
        kv_layout == "NHD"
        and backend == "trtllm-gen"
        and window_left == -1
        and max_seq_len == MAX_SEQ_LEN
    )
    rows = list(range(len(query) + 1))
    out.copy_(attention(query, kv_cache, block_tables, rows, seq_lens, bmm1_scale) * bmm2_scale)
    return out


MAX_SEQ_LEN = 2048
"""What tests build backends for."""

FUNCTIONS = {
    "flashinfer.prefill": (trtllm_fmha_v2_prefill, trtllm_batch_context_with_kv_cache),
    "flashinfer.decode": (xqa_batch_decode_with_kv_cache, trtllm_batch_decode_with_kv_cache),
}
"""Module -> what the backend takes from it."""
