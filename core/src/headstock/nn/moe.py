"""Mixture of experts: which experts a token uses, and what they make of it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headstock.nn.mlp import activate_and_mul
from headstock.spi import Activation, Experts, Scoring

# Found once: finding a member of an Enum is felt in a step of one token on a CPU.
_SIGMOID = Scoring.SIGMOID


def route(scores: Tensor, experts: Experts, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The weights and numbers of each token's best experts.

    scores: [tokens, experts]
    bias: [experts] float32, added to probabilities where `experts.choice_bias` asks for it
    returns: weights [tokens, per_token] in the dtype of `scores`, ids [tokens, per_token] int64
    """
    probabilities = (
        scores.to(torch.float32).sigmoid()
        if experts.scoring is _SIGMOID
        else scores.softmax(-1, dtype=torch.float32)
    )
    weights, ids = _choose(probabilities, experts, bias)
    if experts.renormalize:
        total = weights.sum(-1, keepdim=True)
        weights = weights / (total.clamp_(min=experts.norm_floor) if experts.norm_floor else total)
    if experts.scale != 1:
        weights = weights * experts.scale
    return weights.to(scores.dtype), ids


def _choose(probabilities: Tensor, experts: Experts, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The probabilities and numbers of the best experts, by probability or with the bias added."""
    if not experts.choice_bias and experts.groups == 1:
        return probabilities.topk(experts.per_token, -1)
    values = probabilities
    if experts.choice_bias:
        assert bias is not None, "the configuration declares a bias of the choice"
        values = values + bias
    if experts.groups > 1:
        values = _mask_groups(values, experts)
    ids = values.topk(experts.per_token, -1).indices
    return probabilities.gather(-1, ids), ids


def _mask_groups(values: Tensor, experts: Experts) -> Tensor:
    """The values with -inf for experts outside each token's best groups.

    values, result: [tokens, experts]
    """
    # Not 0: with a bias the values of chosen groups may lie below.
    grouped = values.unflatten(-1, (experts.groups, -1))  # type: ignore[no-untyped-call]
    sums = grouped.topk(experts.group_best, -1).values.sum(-1)
    best = sums.topk(experts.groups_per_token, -1).indices
    is_out = torch.ones_like(sums, dtype=torch.bool).scatter_(-1, best, False)
    masked: Tensor = grouped.masked_fill(is_out[..., None], float("-inf")).flatten(-2)
    return masked


def mix_experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: Activation = Activation.SILU,
) -> Tensor:
    """The weighted sum of what each token's experts make of it.

    x, result: [tokens, hidden]    weights, ids: [tokens, per_token]
    gate_up: [experts, 2 * intermediate, hidden]    down: [experts, hidden, intermediate]
    raises: RuntimeError inside the capture of a graph, where the experts are multiplied one by one
    """
    # Stable, so that an expert multiplies its tokens in the same order in every run.
    order = ids.flatten().argsort(stable=True)
    grouped = x[order // ids.shape[1]]
    multiply = run_experts_grouped if has_grouped_mm(x, gate_up) else run_experts_one_by_one
    # Back to the tokens' order before summing, so that no token's sum depends on its neighbours.
    outputs = torch.empty_like(grouped)
    outputs[order] = multiply(grouped, ids, gate_up, down, activation)
    return (outputs.view(*ids.shape, -1) * weights[..., None]).sum(1)


def run_experts_grouped(
    grouped: Tensor,
    ids: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: Activation = Activation.SILU,
) -> Tensor:
    """The experts' outputs, in two grouped products; nothing is read on the host.

    grouped, result: [tokens * per_token, hidden], the first expert's tokens first
    """
    ones = torch.ones(ids.numel(), dtype=torch.int32, device=ids.device)
    counts = torch.zeros(len(gate_up), dtype=torch.int32, device=ids.device).scatter_add_(
        0, ids.flatten(), ones
    )
    ends = counts.cumsum(0, dtype=torch.int32)
    inner = activate_and_mul(F.grouped_mm(grouped, gate_up.mT, offs=ends), activation)
    return F.grouped_mm(inner, down.mT, offs=ends)


def run_experts_one_by_one(
    grouped: Tensor,
    ids: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: Activation = Activation.SILU,
) -> Tensor:
    """As `run_experts_grouped`, with the number of each expert's tokens read on the host.

    raises: RuntimeError in a capture
    """
    # Checked first: a number that is read inside a capture spoils more than the graph.
    if _is_capturing(grouped):
        raise RuntimeError(
            "how many tokens each expert gets is counted on the host, so no graph holds these "
            "experts"
        )
    counts = ids.flatten().bincount(minlength=len(gate_up)).tolist()
    parts = [
        F.linear(activate_and_mul(F.linear(part, gate_up[expert]), activation), down[expert])
        for expert, part in enumerate(torch.split(grouped, counts))
        if len(part)
    ]
    return torch.cat(parts)


def has_grouped_mm(x: Tensor, gate_up: Tensor) -> bool:
    """Whether torch has a kernel for products of groups whose sizes are on the device.

    It does for bfloat16 on Hopper and Blackwell with rows of whole 16 bytes. Elsewhere `grouped_mm`
    reads the sizes on the host and multiplies one by one.
    """
    _, double, hidden = gate_up.shape
    whole = hidden % 8 == 0 and double % 16 == 0
    return (
        whole
        and x.is_cuda
        and x.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(x.device)[0] in (9, 10)
    )


def _is_capturing(x: Tensor) -> bool:
    """Whether a graph of the work on the tensor's device is being captured."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
