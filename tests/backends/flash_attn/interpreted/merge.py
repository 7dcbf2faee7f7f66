"""The merge of shared prefixes against softmax over both parts in float32."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headstock.nn.attention import merge as in_torch
from headstock_fa.merge import merge_prefixes


def attention(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Attention and LSE.   scores: [rows, heads, tokens]    values: [rows, tokens, heads, dim]"""
    return torch.einsum("rht,rthd->rhd", scores.softmax(-1), values), scores.logsumexp(-1)


def strided(lse: Tensor) -> Tensor:
    """The LSE as the library lays it out, heads first."""
    return lse.t().contiguous().t()


@settings(max_examples=12)
@given(
    rows=st.integers(1, 5),
    heads=st.sampled_from([1, 3, 16, 17, 40]),
    dim=st.sampled_from([1, 16, 96, 128]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    spread=st.sampled_from([0.1, 3.0, 60.0]),
    seed=st.integers(0, 9999),
)
@pytest.mark.parametrize("ways", ["triton", "torch"])
def test_both_parts_together_are_attention_over_all(
    ways: str,
    rows: int,
    heads: int,
    dim: int,
    dtype: torch.dtype,
    spread: float,
    seed: int,
) -> None:
    noise = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, heads, 9, generator=noise) * spread
    values = torch.randn(rows, 9, heads, dim, generator=noise)
    shared_lens = torch.randint(0, 2, (rows,), generator=noise, dtype=torch.int32) * 16
    cut = 4
    prefix_out, prefix_lse = attention(scores[..., :cut], values[:, :cut])
    out, lse = attention(scores[..., cut:], values[:, cut:])
    whole, whole_lse = attention(scores, values)
    is_shared = shared_lens > 0
    wanted = torch.where(is_shared[:, None, None], whole, out)
    wanted_lse = torch.where(is_shared[:, None], whole_lse, lse)
    # What the library leaves where no row is.
    prefix_out[~is_shared], prefix_lse[~is_shared] = math.nan, math.nan

    out, prefix_out = out.to(dtype), prefix_out.to(dtype)
    lse = strided(lse)
    merge = merge_prefixes if ways == "triton" else in_torch.merge_prefixes
    merge(out, lse, prefix_out, strided(prefix_lse), shared_lens)

    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(out.float(), wanted, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse, wanted_lse, atol=1e-5, rtol=1e-5)


def test_rows_without_a_group_stay_bit_by_bit_as_they_are() -> None:
    out, lse = torch.randn(3, 4, 16).bfloat16(), torch.randn(3, 4)
    before, sums = out.clone(), lse.clone()
    undefined = torch.full_like(out, math.nan), torch.full_like(lse, math.nan)
    merge_prefixes(out, lse, *undefined, torch.zeros(3, dtype=torch.int32))
    assert torch.equal(out, before) and torch.equal(lse, sums)


def test_padding_between_rows_is_not_written() -> None:
    wide = torch.zeros(2, 9, 16)
    out = wide[:, :4]
    shared = torch.full((2,), 16, dtype=torch.int32)
    merge_prefixes(out, torch.zeros(2, 4), torch.ones(2, 4, 16), torch.zeros(2, 4), shared)
    assert (out == 0.5).all() and (wide[:, 4:] == 0).all()
