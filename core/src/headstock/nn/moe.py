"""Mixture of experts: which experts a token uses, and what they make of it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headstock.nn.mlp import silu_and_mul
from headstock.spi import Experts


def route(scores: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
    """The weights and numbers of each token's best experts.

    scores: [tokens, experts]
    returns: weights [tokens, per_token] in the dtype of `scores`, ids [tokens, per_token] int64
    """
    weights, ids = scores.softmax(-1, dtype=torch.float32).topk(experts.per_token, -1)
    if experts.renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(scores.dtype), ids


def mix_experts(x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The weighted sum of what each token's experts make of it.

    x, result: [tokens, hidden]    weights, ids: [tokens, per_token]
    gate_up: [experts, 2 * intermediate, hidden]    down: [experts, hidden, intermediate]
    raises: RuntimeError inside the capture of a graph
    """
    if capturing(x):  # asked for first: a number that is read inside a capture spoils more than the graph
        raise RuntimeError("how many tokens each expert gets is counted on the host, so no graph holds experts")
    per_token = ids.shape[1]
    order = ids.flatten().argsort(stable=True)
    grouped = x[order // per_token]
    counts = ids.flatten().bincount(minlength=len(gate_up)).tolist()
    outputs = [
        F.linear(silu_and_mul(F.linear(part, gate_up[expert])), down[expert])
        for expert, part in enumerate(torch.split(grouped, counts))
        if len(part)
    ]
    # Back to the tokens' order before summing, so that no token's sum depends on its neighbours.
    chosen = torch.empty_like(grouped)
    chosen[order] = torch.cat(outputs)
    return (chosen.view(*ids.shape, -1) * weights[..., None]).sum(1)


def capturing(x: Tensor) -> bool:
    """Whether a graph of the work on the tensor's device is being captured."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
