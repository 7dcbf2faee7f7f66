"""Attention sinks: a learned score for each head that takes a part of the softmax and no value."""

from __future__ import annotations

import torch
from torch import Tensor


def scale_by_sinks(
    out: Tensor, lse: Tensor, sinks: Tensor, query_start: Tensor | None = None
) -> None:
    """Make attention without sinks attention with them.

    out: [tokens, heads, out_dim]    lse: [tokens, heads] float32    sinks: [heads] float32
    query_start: that of the step, whose last tokens may be those of no row; None where all are
    writes: out, at tokens of rows
    """
    share = torch.sigmoid(lse - sinks)
    if query_start is not None:
        # Kernels leave anything there, and what a graph pads must stay as it is.
        is_padding = torch.arange(len(out), device=out.device) >= query_start[-1]
        share.masked_fill_(is_padding[:, None], 1.0)
    out.mul_(share[..., None])
