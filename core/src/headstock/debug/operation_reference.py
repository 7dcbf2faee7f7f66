"""The torch set over plain weights: what `--debug-ops` compares every operation with."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from headstock.errors import PluginBroken
from headstock.nn.sampler import attach_logprobs, score_tokens
from headstock.ops.torch_ops import TorchOps
from headstock.spi import (
    ALONE,
    Batch,
    Collectives,
    LayerConfig,
    ModelConfig,
    Ops,
    Params,
    ParamSpec,
    Sample,
    Sampling,
    Stream,
    Weight,
)

TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""By type, how far a result may be off, as a part of the largest number of its row."""
LOGPROB_TOLERANCE = 1e-2
"""How far a log-probability may be off, as a part of the largest score of its row."""
ROUNDING = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""As above, of the stream that a result is added to, which is rounded to its type."""


class PlainWeights:
    """Keeps a plain copy of each parameter, and hands it to the operations' `prepare`.

    unpack: makes the plain tensor of a packed weight
    """

    def __init__(
        self,
        prepare: Callable[[ParamSpec, Weight], Weight],
        unpack: Callable[[ParamSpec, Weight], Tensor],
    ) -> None:
        self._prepare = prepare
        self._unpack = unpack
        self.kept: list[Weight] = []

    def prepare(self, spec: ParamSpec, weight: Weight) -> Weight:
        """Prepare the weight, after a copy of it was kept."""
        bias = None if weight.bias is None else weight.bias.clone()
        tensor = weight.tensor.clone() if weight.format is None else self._unpack(spec, weight)
        self.kept.append(Weight(tensor=tensor, bias=bias))
        return self._prepare(spec, weight)

    def name_by(self, params: Params) -> Mapping[str, Weight]:
        """The kept weights by the names of the parameters that were loaded, in their order."""
        return dict(zip(params, self.kept, strict=True))


class OperationReference:
    """Computes what operations should, and compares.

    params: plain weights by name    who: the operations, as errors name them
    loss: what they may be off by beside rounding, as `OpsCapabilities.weight_loss` has it
    """

    def __init__(
        self,
        params: Params,
        config: ModelConfig,
        who: str,
        loss: float = 0.0,
        collectives: Collectives = ALONE,
    ) -> None:
        self.who = who
        self.loss = loss
        self.ops: Ops = TorchOps()
        self.ops.bind(params, config, collectives)
        self.shared: dict[Hashable, Any] = {}

    def embed(self, batch: Batch) -> Tensor:
        """The stream at the batch's tokens, [tokens, hidden]."""
        self.shared = {}
        return self.ops.embed(batch).settle()

    def qkv_rope_store(self, x: Stream, layer: LayerConfig, batch: Batch) -> Tensor:
        """Queries of the layer, [tokens, heads, head_dim].   writes: batch.pools[layer.index]"""
        return self.ops.qkv_rope_store(self._copy(x), layer, batch)

    def run_layer(
        self,
        operation: str,
        x: Stream,
        layer: LayerConfig,
        batch: Batch,
        *more: Tensor,
    ) -> Tensor:
        """The stream after an operation that adds to it, [tokens, hidden]."""
        run = getattr(self.ops, operation)
        copies = [tensor.clone() for tensor in more]
        y: Stream = run(self._copy(x), *copies, layer, batch)
        return y.settle()

    def final_norm(self, x: Stream, batch: Batch) -> Tensor:
        """The normalized hidden states."""
        return self.ops.final_norm(self._copy(x), batch)

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Scores, [n, vocab] float32."""
        return self.ops.lm_head(hidden)

    def _copy(self, x: Stream) -> Stream:
        """A stream that an operation may write; nothing pends."""
        return Stream(x.copy_total(), shared=self.shared)

    def compare(
        self, result: Tensor, expected: Tensor, what: str, before: Tensor | None = None
    ) -> None:
        """Raise PluginBroken when a result is further off than its type allows.

        Rows whose reference is not finite are skipped: their logits are checked instead.

        found, wanted: [n, numbers]
        before: the stream that a term was added to, which is compared without it
        """
        if result.shape != expected.shape:
            raise PluginBroken(
                f"{self.who} gave wrong {what}: expected {list(expected.shape)}, as plain torch, "
                f"got {list(result.shape)}"
            )
        dtype = result.dtype if before is None else before.dtype
        dtype = dtype if dtype in TOLERANCE else torch.bfloat16
        actual, right = result.float(), expected.float()
        tolerance = TOLERANCE[dtype] + self.loss
        allowed = right.abs().amax(-1) * tolerance
        if before is not None:
            base = before.float()
            allowed = (right - base).abs().amax(-1) * tolerance
            allowed += torch.maximum(base.abs(), right.abs()).amax(-1) * ROUNDING[dtype]
        errors = (actual - right).abs().amax(-1).nan_to_num(nan=math.inf)
        is_off = (errors > allowed.clamp(min=1e-30)) & right.isfinite().all(-1)
        if bool(is_off.any()):
            ratios = torch.where(is_off, errors / allowed.clamp(min=1e-30), 0.0)
            at = int(ratios.argmax())
            raise PluginBroken(
                f"{self.who} is off by {float(errors[at]):.3g} in {what}, at token {at} of the "
                f"step, from plain torch ({float(allowed[at]):.2g} is allowed)"
            )

    def find_sampling_fault(self, sampled: Sample, logits: Tensor, sampling: Sampling) -> str:
        """Describe a sampled token with a lower score than others; empty without one.

        logits: [n, vocab] float32
        """
        scores = score_tokens(logits.clone(), sampling)
        best = scores.amax(-1)
        mine = scores.gather(-1, sampled.tokens[:, None])[:, 0]
        # Noise is added to scores divided by the temperature, which errors grow by.
        spread = logits.abs().amax(-1) * (1e-3 + self.loss)
        if sampling.temperature is not None:
            cold = sampling.temperature.clamp(min=1e-2)
            spread = torch.where(sampling.temperature > 0, spread / cold, spread)
        is_off = best.isfinite() & sampled.healthy & ~(mine >= best - spread.clamp(min=1e-5))
        if not bool(is_off.any()):
            tolerance = LOGPROB_TOLERANCE + self.loss
            return _find_logprob_fault(sampled, logits, sampling, tolerance)
        at = int(is_off.nonzero()[0])
        return (
            f"sampled the token {int(sampled.tokens[at])} at logit {at}, whose score is "
            f"{float(best[at] - mine[at]):.3g} below the best of plain torch"
        )


def _find_logprob_fault(
    sampled: Sample, logits: Tensor, sampling: Sampling, tolerance: float
) -> str:
    """Describe a log-probability that differs from the model's; empty without one.

    logits: [n, vocab] float32
    """
    if sampled.logprobs is None or sampled.top_ids is None or sampled.top_logprobs is None:
        return "" if sampling.top_logprobs < 0 else "gave no log-probabilities, which are asked for"
    logprobs = logits.log_softmax(-1)
    expected = attach_logprobs(sampled.tokens, sampled.healthy, logprobs, sampling)
    assert expected.logprobs is not None and expected.top_logprobs is not None
    allowed = logits.nan_to_num(0, 0, 0).abs().amax(-1) * tolerance
    ids = sampled.top_ids.clamp(0, logits.shape[1] - 1)
    pairs = {
        "a token's log-probability": (sampled.logprobs[:, None], expected.logprobs[:, None]),
        "log-probabilities of alternatives": (sampled.top_logprobs, expected.top_logprobs),
        "the ids of alternatives": (sampled.top_logprobs, logprobs.gather(1, ids)),
    }
    for what, (found, right) in pairs.items():
        if found.shape != right.shape:
            return f"gave a wrong {what}: expected {list(right.shape)}, got {list(found.shape)}"
        # Equal values first: the difference of two infinities is NaN.
        errors = torch.where(found == right, 0.0, (found - right).abs()).nan_to_num(nan=math.inf)
        is_off = (errors > allowed[:, None]).any(-1) & sampled.healthy
        if bool(is_off.any()):
            at = int(is_off.nonzero()[0])
            return f"is off by {float(errors[at].max()):.3g} in {what}, at logit {at}"
    if sampled.ranks is None:
        return ""
    mine = expected.logprobs[:, None]
    least = (logprobs > mine + allowed[:, None]).sum(-1)
    most = (logprobs >= mine - allowed[:, None]).sum(-1)
    is_off = ((sampled.ranks < least) | (sampled.ranks > most)) & sampled.healthy
    if bool(is_off.any()):
        at = int(is_off.nonzero()[0])
        return f"gave the rank {int(sampled.ranks[at])} for a token, at logit {at}"
    return ""
