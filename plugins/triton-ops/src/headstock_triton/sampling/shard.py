"""`headstock.nn.vocab_shard.sample_shard` in two kernels and one exchange between ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from attrs import evolve
from torch import Tensor

from headstock.nn.penalties import apply_logit_rules_
from headstock.nn.vocab_shard import take_own_rules
from headstock.spi import Sample, Sampling
from headstock_triton.sampling.sampler import Joined, has_rules, join_parts, sample_parts


def fused_sample_shard(
    logits: Tensor,
    sampling: Sampling,
    own: range,
    all_gather: Callable[[Tensor], Tensor],
    *,
    pdl: bool = False,
) -> Sample:
    """The tokens of rows of which each rank has a part; all ranks return the same.

    logits: [n, at least the tokens of the part] of any float type
    sampling: for which `headstock.nn.vocab_shard.needs_whole_rows` does not hold
    own: the token ids of the rank's part
    all_gather: that of the ranks
    writes: logits
    """
    rules = take_own_rules(sampling, own)
    if has_rules(sampling):
        logits = logits.to(torch.float32)
        apply_logit_rules_(logits[:, : len(own)], rules)
        rules = evolve(rules, mask=None)
    # Scores are relative to the highest logit of their part, which goes with them: the kernel that
    # joins the parts of a row on one rank joins those of all ranks.
    numbers = sample_parts(logits, rules, own=own, pdl=pdl)[:3]
    # As integers, of which no bit changes on the way.
    parts = all_gather(numbers.view(torch.int32)).contiguous().view(torch.float32)
    joined = Joined(
        torch.empty(len(logits), dtype=torch.int64, device=logits.device),
        torch.empty(len(logits), dtype=torch.uint8, device=logits.device),
    )
    # Not early: the exchange is no kernel of this set, and may run on a stream of its own.
    join_parts(logits, rules, parts, None, joined, pdl=False)
    return Sample(tokens=joined.tokens, healthy=joined.healthy.view(torch.bool))
