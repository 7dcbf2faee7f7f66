"""FlashInfer's wrappers with the library's signatures, written in torch, for machines without a
GPU.

Like the library on a GPU, a fake reads the host arrays of a plan late: when the plan's first run
needs them. Arrays that are overwritten before that give wrong answers.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from headstock_conformance.attention import row_attention
from headstock_conformance.model.paged import gather_kv


class Planned:
    """What both wrappers do."""

    def keep(
        self, query_start: Tensor | None, page_start: Tensor, pages: Tensor, last: Tensor,
        shape: tuple[int, ...],
        scale: float, types: tuple[Any, ...], causal: bool, window_left: int,
    ) -> None:  # fmt: skip
        assert page_start.device.type == last.device.type == "cpu"
        assert {page_start.dtype, pages.dtype, last.dtype} == {torch.int32}
        self.host = (query_start, page_start, last)  # no copy: the upload runs later
        self.pages, self.shape, self.scale, self.types, self.causal = (
            pages,
            shape,
            scale,
            types,
            causal,
        )
        self.window = None if window_left < 0 else window_left + 1
        self.uploaded: tuple[list[int], ...] | None = None
        self.plans = getattr(self, "plans", 0) + 1

    def upload(self) -> tuple[list[int], ...]:
        if self.uploaded is None:
            query_start, page_start, last = self.host
            rows = len(last)
            start = list(range(rows + 1)) if query_start is None else query_start.tolist()
            self.uploaded = (start, page_start.tolist(), last.tolist())
        return self.uploaded

    def attend(
        self, q: Tensor, cache: Tensor, out: Tensor, lse: Tensor | None, q_scale: float | None,
        k_scale: float | None, v_scale: float | None, natural: bool = False,
    ) -> None:  # fmt: skip
        query_start, page_start, last = self.upload()
        heads, kv_heads, head_dim, page_size = self.shape
        assert q.shape == out.shape == (query_start[-1], heads, head_dim)
        assert cache.shape[1:] == (2, page_size, kv_heads, head_dim)
        assert (q.dtype, cache.dtype, out.dtype) == self.types
        assert v_scale != 1.0, "a scale of values costs an operation"
        for row, tail in enumerate(last):
            assert 1 <= tail <= page_size
            pages = self.pages[page_start[row] : page_start[row + 1]].long()
            context = (len(pages) - 1) * page_size + tail
            keys, values = (side.float() for side in gather_kv(cache, pages, context))
            part = slice(query_start[row], query_start[row + 1])
            assert self.causal or part.stop - part.start == 1
            scale = self.scale * (q_scale or 1) * (k_scale or 1)
            answer, sums = row_attention(q[part], keys, values, scale, self.window)
            out[part] = (answer * (v_scale or 1)).to(out.dtype)
            if lse is not None:
                lse[part] = (sums / (1 if natural else math.log(2))).float()


class BatchPrefillWithPagedKVCacheWrapper(Planned):
    """For prompts, as in 0.6.18."""

    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None,
        paged_kv_indptr_buf=None, paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None,
        custom_mask_buf=None,
        mask_indptr_buf=None, backend="auto", jit_args=None, jit_kwargs=None,
    ) -> None:  # fmt: skip
        assert kv_layout == "NHD" and backend in ("auto", "fa2", "fa3") and not use_cuda_graph
        self.backend = backend

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads,
        num_kv_heads,
        head_dim_qk, page_size, head_dim_vo=None, custom_mask=None, packed_custom_mask=None,
        causal=False,
        pos_encoding_mode="NONE", use_fp16_qk_reduction=False, sm_scale=None, window_left=-1,
        logits_soft_cap=None,
        rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None,
        o_data_type=None,
        non_blocking=True, prefix_len_ptr=None, token_pos_in_items_ptr=None,
        token_pos_in_items_len=0,
        max_item_len_ptr=None, seq_lens=None, seq_lens_q=None, block_tables=None,
        max_token_per_sequence=None,
        max_sequence_kv=None, fixed_split_size=None, disable_split_kv=False,
    ) -> None:  # fmt: skip
        assert not logits_soft_cap
        assert max_token_per_sequence == int(qo_indptr.diff().max())
        self.keep(
            qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len,
            (num_qo_heads, num_kv_heads, head_dim_qk, page_size), sm_scale, (q_data_type,
            kv_data_type, o_data_type),
            causal, window_left,
        )  # fmt: skip

    def run(
        self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None,
        lse=None,
        return_lse=False, enable_pdl=None, window_left=None, sinks=None, kv_cache_sf=None,
        skip_softmax_threshold_scale_factor=None, use_fp16_softmax=None, uses_spcompress=None,
    ) -> Any:  # fmt: skip
        self.attend(q, paged_kv_cache, out, lse if return_lse else None, q_scale, k_scale, v_scale)
        return (out, lse) if return_lse else out


class LaterPrefillWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """For prompts, as in 0.7.2: `run` can be told the base of its logarithms."""

    def run(
        self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None,
        lse=None,
        return_lse=False, lse_base="log2", lse_layout="NH", enable_pdl=None, window_left=None,
        sinks=None,
        kv_cache_sf=None, skip_softmax_threshold_scale_factor=None, use_fp16_softmax=None,
        uses_spcompress=None,
    ) -> Any:  # fmt: skip
        natural = {"log2": False, "ln": True}[lse_base]
        self.attend(
            q, paged_kv_cache, out, lse if return_lse else None, q_scale, k_scale, v_scale, natural
        )
        return (out, lse) if return_lse else out


class BatchDecodeWithPagedKVCacheWrapper(Planned):
    """For decode, as in 0.6.18 and 0.7.2."""

    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, use_tensor_cores=False,
        paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None,
        paged_kv_last_page_len_buffer=None,
        backend="auto", jit_args=None,
    ) -> None:  # fmt: skip
        assert kv_layout == "NHD"
        self.use_tensor_cores = use_tensor_cores
        self.static = (
            paged_kv_indptr_buffer,
            paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer,
        )
        assert use_cuda_graph == all(buffer is not None for buffer in self.static)
        self.use_cuda_graph = use_cuda_graph

    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
        *deprecated_positional_args, **kwargs,
    ) -> None:  # fmt: skip
        assert not deprecated_positional_args
        self._plan_impl(
            indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
            **kwargs
        )  # fmt: skip

    def _plan_impl(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *,
        pos_encoding_mode="NONE", window_left=-1, window_right=0, logits_soft_cap=None,
        q_data_type="float16",
        kv_data_type=None, o_data_type=None, data_type=None, sm_scale=None, rope_scale=None,
        rope_theta=None,
        non_blocking=True, block_tables=None, seq_lens=None, fixed_split_size=None,
        disable_split_kv=False,
        q_len_per_req=1,
    ) -> None:  # fmt: skip
        assert self.use_tensor_cores or num_qo_heads // num_kv_heads in (1, 2, 3, 4, 8)
        if self.use_cuda_graph:
            starts, pages, lens = self.static
            assert len(last_page_len) == len(lens) and len(indices) <= len(pages)
            starts.copy_(indptr), lens.copy_(last_page_len)
            pages[: len(indices)].copy_(indices)
            indptr, indices, last_page_len = starts, pages, lens
        self.keep(
            None, indptr, indices, last_page_len, (num_qo_heads, num_kv_heads, head_dim,
            page_size), sm_scale,
            (q_data_type, kv_data_type, o_data_type), False, window_left,
        )  # fmt: skip

    def run(
        self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None,
        lse=None,
        return_lse=False, enable_pdl=None, window_left=None, sinks=None, q_len_per_req=None,
        skip_softmax_threshold_scale_factor=None, kv_cache_sf=None,
    ) -> Any:  # fmt: skip
        self.attend(q, paged_kv_cache, out, lse if return_lse else None, q_scale, k_scale, v_scale)
        return (out, lse) if return_lse else out


def fast_decode_plan(
    self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
    pos_encoding_mode="NONE",
    window_left=-1, logits_soft_cap=None, q_data_type=None, kv_data_type=None, data_type=None,
    sm_scale=None,
    rope_scale=None, rope_theta=None, non_blocking=True, fixed_split_size=None,
    disable_split_kv=False, q_len_per_req=1,
    global_override_indptr_cpu=None,
) -> None:  # fmt: skip
    """Plan again in a graph's wrapper, whose static buffers must hold the step: nothing is copied
    to them here.
    """
    starts, pages, lens = self.static
    assert self.use_cuda_graph and self.plans and (q_data_type, kv_data_type) == self.types[:2]
    assert (
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
    ) == self.shape and sm_scale == self.scale
    assert torch.equal(starts, global_override_indptr_cpu) and torch.equal(lens, last_page_len)
    assert indices.data_ptr() == pages.data_ptr() and len(indices) == starts[-1]
    assert window_left == (-1 if self.window is None else self.window - 1), "the kernel is another"
    self.keep(None, starts, pages, lens, self.shape, self.scale, self.types, False, window_left)


class BatchMLAPagedAttentionWrapper:
    """For latent vectors, as in 0.6.18 and, by keywords, in 0.7.2."""

    def __init__(
        self, float_workspace_buffer, use_cuda_graph=False, qo_indptr=None, kv_indptr=None,
        kv_indices=None, kv_len_arr=None, backend="auto",
    ) -> None:  # fmt: skip
        static = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        assert use_cuda_graph == all(buffer is not None for buffer in static)
        self.static = static if use_cuda_graph else None

    def plan(
        self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe,
        page_size, causal, sm_scale, q_data_type, kv_data_type, use_profiler=False,
    ) -> None:  # fmt: skip
        host = (qo_indptr, kv_indptr, kv_len_arr)
        assert {each.device.type for each in host} == {"cpu"}
        assert {each.dtype for each in (*host, kv_indices)} == {torch.int32} and causal
        if self.static is not None:
            starts, page_starts, pages, lens = self.static
            for buffer, given in (
                (starts, qo_indptr),
                (page_starts, kv_indptr),
                (lens, kv_len_arr),
            ):
                assert len(buffer) == len(given), "the rows of a graph are always as many"
                buffer.copy_(given)
            pages[: len(kv_indices)].copy_(kv_indices)
            host, kv_indices = (starts, page_starts, lens), pages
        self.host, self.pages = host, kv_indices  # no copy: the upload runs later
        self.shape, self.scale = (num_heads, head_dim_ckv, head_dim_kpe, page_size), sm_scale
        self.types = (q_data_type, kv_data_type)

    def run(
        self, q_nope, q_pe, ckv_cache, kpe_cache, out=None, lse=None, return_lse=False,
        profiler_buffer=None, kv_len=None, page_table=None, return_lse_base_on_e=False,
    ) -> Any:  # fmt: skip
        starts, page_starts, lens = (each.tolist() for each in self.host)
        heads, rank, rope_dim, page_size = self.shape
        assert q_nope.shape == out.shape == (starts[-1], heads, rank)
        assert ckv_cache.shape[1:] == (page_size, rank)
        assert kpe_cache.shape[1:] == (page_size, rope_dim)
        assert (q_nope.dtype, ckv_cache.dtype) == self.types and not return_lse
        q, pool = torch.cat((q_nope, q_pe), -1), torch.cat((ckv_cache, kpe_cache), -1)
        for row, length in enumerate(lens):
            pages = self.pages[page_starts[row] : page_starts[row + 1]].long()
            keys = pool[pages].flatten(0, 1)[:length, None].float()
            part = slice(starts[row], starts[row + 1])
            answer, _ = row_attention(q[part], keys, keys[..., :rank], self.scale)
            out[part] = answer.to(out.dtype)
        return out


def flashinfer(version: str) -> SimpleNamespace:
    """The module `flashinfer` of a version."""
    prefill = (
        BatchPrefillWithPagedKVCacheWrapper if version.startswith("0.6") else LaterPrefillWrapper
    )
    return SimpleNamespace(
        __version__=version,
        BatchPrefillWithPagedKVCacheWrapper=prefill,
        BatchDecodeWithPagedKVCacheWrapper=BatchDecodeWithPagedKVCacheWrapper,
    )
