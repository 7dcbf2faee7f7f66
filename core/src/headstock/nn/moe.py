"""Mixture of experts: which experts a token uses, and what they make of it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headstock.nn.mlp import activate_and_mul
from headstock.spi import Activation, ClampedGate, Experts, Scoring

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


def number_own_experts(ids: Tensor, experts: Experts) -> Tensor:
    """The numbers of experts among those of this rank; `experts.held` for experts of other ranks.

    ids, result: [tokens, per_token]
    """
    if not experts.held:
        return ids
    own = ids - experts.first
    return own.masked_fill((own < 0) | (own >= experts.held), experts.held)


def mix_experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: Activation | ClampedGate = Activation.SILU,
    *,
    biases: tuple[Tensor, Tensor] | None = None,
    is_shard: bool = False,
) -> Tensor:
    """The weighted sum of what each token's experts make of it.

    x, result: [tokens, hidden]    weights, ids: [tokens, per_token]
    gate_up: [experts, 2 * intermediate, hidden]    down: [experts, hidden, intermediate]
    biases: of both maps, [experts, 2 * intermediate] and [experts, hidden]
    is_shard: whether ids may be `len(gate_up)`, for experts of other ranks, which add nothing
    raises: RuntimeError inside the capture of a graph, where the experts are multiplied one by one
    """
    # Stable, so that an expert multiplies its tokens in the same order in every run.
    order = ids.flatten().argsort(stable=True)
    grouped = x[order // ids.shape[1]]
    multiply = run_experts_grouped if has_grouped_mm(x, gate_up) else run_experts_one_by_one
    # Back to the tokens' order before summing, so that no token's sum depends on its neighbours.
    outputs = torch.empty_like(grouped)
    outputs[order] = multiply(grouped, ids, gate_up, down, activation, biases)
    terms = outputs.view(*ids.shape, -1) * weights[..., None]
    if is_shard:
        # Not by a weight of 0: rows of no expert may be NaN.
        terms.masked_fill_((ids == len(gate_up))[..., None], 0)
    return terms.sum(1)


def run_experts_grouped(
    grouped: Tensor,
    ids: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: Activation | ClampedGate = Activation.SILU,
    biases: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The experts' outputs, in two grouped products; nothing is read on the host.

    grouped, result: [tokens * per_token, hidden], the first expert's tokens first; rows with the id
        `len(gate_up)`, which come last, are undefined
    """
    ones = torch.ones(ids.numel(), dtype=torch.int32, device=ids.device)
    counts = torch.zeros(len(gate_up) + 1, dtype=torch.int32, device=ids.device).scatter_add_(
        0, ids.flatten(), ones
    )
    ends = counts[:-1].cumsum(0, dtype=torch.int32)
    product = F.grouped_mm(grouped, gate_up.mT, offs=ends)
    if biases is None:
        return F.grouped_mm(activate_and_mul(product, activation), down.mT, offs=ends)
    # Rows of other ranks' experts come last, and any bias will do for them.
    numbers = ids.flatten().sort().values.clamp_(max=len(gate_up) - 1)
    first, second = (bias.index_select(0, numbers) for bias in biases)
    inner = activate_and_mul(product.add_(first), activation)
    return F.grouped_mm(inner, down.mT, offs=ends).add_(second)


def run_experts_one_by_one(
    grouped: Tensor,
    ids: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: Activation | ClampedGate = Activation.SILU,
    biases: tuple[Tensor, Tensor] | None = None,
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
    counts = ids.flatten().bincount(minlength=len(gate_up) + 1).tolist()
    *parts, others = torch.split(grouped, counts)
    outputs = []
    for expert, part in enumerate(parts):
        if len(part):
            first, second = (None, None) if biases is None else (bias[expert] for bias in biases)
            inner = activate_and_mul(F.linear(part, gate_up[expert], first), activation)
            outputs.append(F.linear(inner, down[expert], second))
    return torch.cat([*outputs, others]) if len(others) else torch.cat(outputs)


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
