"""Top-n-sigma sampling (Tang et al. 2024, arXiv 2411.07641).

Scores of a trained model are noise around a normal distribution, and a few tokens well above it. So
tokens are kept whose scores are within n standard deviations of the best one. Unlike with top-p or
min-p, a higher temperature keeps the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from headstock.spi import LogitColumn, LogitsProcessor
from headstock.spi.arrays import Ints
from headstock_top_n_sigma.args import TopNSigmaArgs


class TopNSigma(LogitsProcessor):
    """Drops the scores that are too far below the best one."""

    @property
    def columns(self) -> Mapping[str, LogitColumn]:
        """How many standard deviations are kept: all of them for rows that say nothing."""
        return {"n": LogitColumn(neutral=math.inf)}

    @property
    def changes_argmax(self) -> bool:
        """No: the best token is kept, so greedy rows do without."""
        return False

    def row(self, args: Any, prompt: Ints, vocab: int) -> Mapping[str, Any] | None:
        """The value of a request."""
        return {"n": args.top_n_sigma} if isinstance(args, TopNSigmaArgs) else None

    def apply(self, logits: Tensor, at: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        """Drop scores; the temperature that they are divided by cancels out."""
        # Tokens that a mask or a ban has taken out are no part of the distribution.
        there = logits.isfinite()
        count = there.sum(-1, keepdim=True)
        known = logits.masked_fill(~there, 0.0)
        mean = known.sum(-1, keepdim=True) / count
        spread = (
            (known - mean).masked_fill(~there, 0.0).square().sum(-1, keepdim=True) / count
        ).sqrt()
        floor = logits.amax(-1, keepdim=True) - columns["n"][:, None] * spread
        # Infinity times a spread of 0, where one token alone is left, is no number.
        return logits.masked_fill_(logits < floor.nan_to_num_(-math.inf), -math.inf)
