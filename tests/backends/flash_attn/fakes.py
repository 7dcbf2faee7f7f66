"""FlashAttention's functions with the libraries' signatures, written in torch, for machines without
a GPU.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from headstock_conformance.attention import row_attention

VLLM_SCHEMA = """fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v,
Tensor(a!)? out, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor?
seqused_q, Tensor? seqused_k, int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, Tensor?
kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, Tensor? rotary_sin, Tensor? seqlens_rotary,
Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, float softmax_scale, bool is_causal, int
window_size_left, int window_size_right, float softcap, bool is_rotary_interleaved, Tensor?
scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin, Tensor? s_aux, int cp_world_size,
int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]"""
"""The operator of vLLM 0.24 and 0.26, as its library registers it."""

VLLM_SCHEDULER_SCHEMA = """get_scheduler_metadata(int batch_size, int max_seqlen_q, int
max_seqlen_k, int num_heads, int num_heads_k, int headdim, int headdim_v, ScalarType qkv_dtype,
Tensor seqused_k, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor?
seqused_q, Tensor? leftpad_k, int? page_size, int max_seqlen_k_new, bool is_causal, int
window_size_left, int window_size_right, bool has_softcap, int num_splits, bool? pack_gqa, int
sm_margin) -> Tensor"""
"""The operator that makes schedules for it."""


NUMBERS = itertools.count()


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    page_table: Tensor,
    scale: float,
    window: tuple[int, int],
    softcap: float,
    causal: bool,
    q_v: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Paged attention, row by row; NaN for tokens of no row.

    Without `causal` each query sees its row's whole context. Scores are those of keys, and with
    `q_v` those of values too.

    returns: [tokens, heads, v_dim], [heads, tokens] natural logarithms
    """
    if q_v is not None:
        assert q.shape[-1] == 64 and q_v.shape[-1] == v.shape[-1] == 512 and q_v.dtype == q.dtype
        q, k = torch.cat((q_v, q), -1), torch.cat((v, k), -1)
    assert window[1] in ((0, -1) if causal else (-1,)) and q.dtype == k.dtype == v.dtype
    assert page_table.dtype == context_lens.dtype == torch.int32
    shape = (*q.shape[:2], v.shape[-1])
    answers = q.new_full(shape, math.nan, dtype=torch.bfloat16 if q.itemsize == 1 else q.dtype)
    sums = q.new_full((q.shape[1], len(q)), math.nan, dtype=torch.float32)
    bounds = query_start.tolist()
    for row, context in enumerate(context_lens.tolist()):
        pages = page_table[row, : -(-context // k.shape[1])].long()
        keys, values = (side[pages].flatten(0, 1)[:context] for side in (k, v))
        seen = None if window[0] < 0 else window[0] + 1
        first, last = bounds[row], bounds[row + 1]
        # A query that sees everything is the last of a row of its own.
        for some in (
            [slice(first, last)] if causal else [slice(i, i + 1) for i in range(first, last)]
        ):
            answer, logs = row_attention(q[some], keys, values, scale, seen, softcap)
            answers[some], sums[:, some] = answer.to(answers.dtype), logs.t().float()
    return answers, sums


def interface() -> SimpleNamespace:
    """The module `flash_attn_interface` of FlashAttention-3."""

    def flash_attn_with_kvcache(
        q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None,
        cache_seqlens=None,
        cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None,
        cu_seqlens_k_new=None,
        max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None,
        softmax_scale=None,
        causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
        scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
    ) -> Any:  # fmt: skip
        assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q
        out, lse = attention(
            q,
            k_cache,
            v_cache,
            cu_seqlens_q,
            cache_seqlens,
            page_table,
            softmax_scale,
            window_size,
            softcap,
            causal,
            qv,
        )
        return (out, lse) if return_softmax_lse else out

    return SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache)


def vllm_schedule(
    batch_size, max_seqlen_q, max_seqlen_k, num_heads, num_heads_k, headdim, headdim_v, qkv_dtype,
    seqused_k, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, leftpad_k, page_size,
    max_seqlen_k_new, is_causal, window_size_left, window_size_right, has_softcap, num_splits,
    pack_gqa, sm_margin,
) -> Tensor:  # fmt: skip
    """What the library would read off a step, and for how many processors; it fails for no rows."""
    assert batch_size == len(seqused_k) == len(cu_seqlens_q) - 1 > 0 and num_splits > 1
    numbers = [
        max_seqlen_q, max_seqlen_k, num_heads, num_heads_k, headdim, headdim_v, page_size,
        int(is_causal), window_size_left, window_size_right, int(has_softcap), num_splits,
        qkv_dtype.itemsize,
    ]  # fmt: skip
    lens = [*seqused_k.tolist(), *cu_seqlens_q.tolist()]
    return torch.tensor([sm_margin, *numbers, *lens], dtype=torch.int32)


def vllm_forward(
    q, k, v, k_new, v_new, q_v, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q,
    seqused_k, max_seqlen_q,
    max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, seqlens_rotary,
    q_descale, k_descale,
    v_descale, softmax_scale, is_causal, window_size_left, window_size_right, softcap,
    is_rotary_interleaved,
    scheduler_metadata, num_splits, pack_gqa, sm_margin, s_aux, cp_world_size, cp_rank,
    cp_tot_seqused_k,
) -> list[Tensor]:  # fmt: skip
    """vLLM's operator; like the library it wants cu_seqlens_q and, with a page table, no
    cu_seqlens_k.
    """
    assert cu_seqlens_k is None and cp_world_size == 1 and out.stride(-1) == 1
    assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q and int(seqused_k.max()) <= max_seqlen_k
    window = (window_size_left, window_size_right)
    if scheduler_metadata is not None:
        wanted = vllm_schedule(
            len(seqused_k), max_seqlen_q, max_seqlen_k, q.shape[1], k.shape[2], q.shape[2],
            v.shape[3], q.dtype, seqused_k, cu_seqlens_q, None, None, None, None, k.shape[1], 0,
            is_causal, *window, softcap > 0, num_splits, None, 0,
        )  # fmt: skip
        # Whatever number of processors it was made for.
        assert scheduler_metadata[1:].tolist() == wanted[1:].tolist(), "another step's schedule"
    answer, lse = attention(
        q, k, v, cu_seqlens_q, seqused_k, page_table, softmax_scale, window, softcap, is_causal, q_v
    )
    tokens = int(cu_seqlens_q[-1])
    out[:tokens].copy_(answer[:tokens])
    return [out, lse, q.new_empty(0), q.new_empty(0)]


@contextmanager
def vllm_operators() -> Iterator[tuple[Any, Any]]:
    """The two operators of vLLM's library, registered under a name of their own."""
    name = f"headstock_test_fa3_{next(NUMBERS)}"
    library = torch.library.Library(name, "DEF")
    library.define(VLLM_SCHEMA.replace("\n", " "))
    library.define(VLLM_SCHEDULER_SCHEMA.replace("\n", " "))
    library.impl("fwd", vllm_forward, "CPU")
    library.impl("get_scheduler_metadata", vllm_schedule, "CPU")
    found = getattr(torch.ops, name)
    try:
        yield found.fwd.default, found.get_scheduler_metadata.default
    finally:
        library._destroy()


def flash_attn() -> SimpleNamespace:
    """The module `flash_attn` of FlashAttention-2; it takes pages of multiples of 256 only."""

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
        softmax_scale=None,
        causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
        return_attn_probs=False, block_table=None,
    ) -> Any:  # fmt: skip
        assert k.shape[1] % 256 == 0
        out, lse = attention(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k.diff().int(),
            block_table,
            softmax_scale,
            window_size,
            softcap,
            causal,
        )
        return (out, lse, None) if return_attn_probs else out

    def flash_attn_with_kvcache(
        q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
        cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None,
        causal=False,
        window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
        return_softmax_lse=False,
    ) -> Any:  # fmt: skip
        assert k_cache.shape[1] % 256 == 0
        rows, tokens = q.shape[:2]
        start = torch.arange(0, rows * tokens + 1, tokens)
        out, lse = attention(
            q.flatten(0, 1), k_cache, v_cache, start, cache_seqlens, block_table, softmax_scale,
            window_size, softcap,
            causal,
        )  # fmt: skip
        out, lse = out.view(q.shape), lse.view(-1, rows, tokens).transpose(0, 1)
        return (out, lse) if return_softmax_lse else out

    return SimpleNamespace(
        flash_attn_varlen_func=flash_attn_varlen_func,
        flash_attn_with_kvcache=flash_attn_with_kvcache,
    )


def varlen_attn_out(
    out, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None,
    window_size=(-1, -1),
    enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
) -> Any:  # fmt: skip
    """torch's function (2.13 and later)."""
    assert key.shape[1] % 256 == 0
    assert enable_gqa or query.shape[1] == key.shape[2]
    answer, lse = attention(
        query, key, value, cu_seq_q, seqused_k, block_table, scale, window_size, 0.0, True
    )
    out.copy_(answer)
    return (out, lse) if return_aux is not None and return_aux.lse else out
