"""A step of a small model by one set of operations, compared with other ones."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from attrs import frozen
from torch import Tensor

from headstock.nn.decoder import forward
from headstock.ops.bound import BoundOps
from headstock.ops.torch_ops import TorchOps
from headstock.spi import Batch, ModelConfig, Ops
from headstock_conformance.ops.cases import batch_of
from headstock_conformance.ops.models import Weights

ROUNDING = {torch.float32: 2.0**-13, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""Tolerance of every set, relative to the largest number, in addition to twice torch's error in
this type.
"""


@frozen(eq=False)
class StepResult:
    """Hidden states, pools and scores of one step.

    written: per layer, which slots of its pool hold a number

    hidden: [tokens, hidden]    scores: [tokens, vocab]    pools: one per layer
    """

    hidden: Tensor
    scores: Tensor
    pools: tuple[Tensor, ...]
    written: tuple[Tensor, ...]


def make_batch(config: ModelConfig, tokens: int, dtype: torch.dtype, device: str) -> Batch:
    """A step whose pools hold NaN wherever nothing is written."""
    batch = batch_of(config, tokens, dtype, device)
    for pool in batch.pools:
        pool.fill_(float("nan"))
    return batch


def run_step(ops: Ops, config: ModelConfig, weights: Weights, batch: Batch) -> StepResult:
    """A step in which attention returns the queries."""
    params = weights.prepare(ops)
    with torch.inference_mode():
        bound = BoundOps(type(ops).__name__, ops, config)
        bound.bind(params, config)
        hidden = forward(params, config, batch, lambda q, layer: q, bound)
        scores = bound.lm_head(hidden)
    page_size = batch.pools[0].shape[2]
    # results of padding are up to each set
    real = batch.slots[0] >= page_size
    pools = tuple(pool[1:] for pool in batch.pools)
    written = tuple(~pool.isnan().flatten(3).any(-1).any(1) for pool in pools)
    return StepResult(hidden[real], scores[real], pools, written)


def run_exactly(config: ModelConfig, weights: Weights, tokens: int, device: str) -> StepResult:
    """The step by torch's operations in float32."""
    batch = make_batch(config, tokens, torch.float32, device)
    return run_step(TorchOps(), config, weights.widen(), batch)


def check_places(ours: StepResult, truth: StepResult) -> None:
    """Raise AssertionError unless keys and values are in the batch's slots."""
    for index, (actual, expected) in enumerate(zip(ours.written, truth.written, strict=True)):
        missing, stray = int((expected & ~actual).sum()), int((actual & ~expected).sum())
        assert not missing and not stray, (
            f"keys and values of layer {index} are misplaced: {missing} slots of Batch.slots are "
            f"not written, but {stray} others are"
        )


def compare_steps(
    ours: StepResult, theirs: StepResult, truth: StepResult, tolerance: float
) -> None:
    """Raise AssertionError if `ours` has a larger error than torch's.

    tolerance: additional allowed error
    """
    for (name, actual), (_, torchs), (_, exact) in zip(
        list_parts(ours), list_parts(theirs), list_parts(truth), strict=True
    ):
        assert actual.shape == exact.shape, f"{name}: shape {tuple(actual.shape)}"
        worst, allowed = share_off(actual, exact), share_off(torchs, exact)
        most = 2 * allowed + tolerance
        assert worst <= most, f"{name} are off by {worst:.1e} of the largest, {most:.1e} is allowed"


def list_parts(step: StepResult) -> Iterator[tuple[str, Tensor]]:
    """The compared results of a step, in the order of computation."""
    for index, pool in enumerate(step.pools):
        yield f"keys of layer {index}", pool[:, 0]
        yield f"values of layer {index}", pool[:, 1]
    yield "hidden states", step.hidden
    yield "scores", step.scores


def share_off(actual: Tensor, exact: Tensor) -> float:
    """The largest difference, relative to the largest number; infinite if NaN is in other
    places."""
    actual, exact = actual.float(), exact.float()
    if not torch.equal(actual.isnan(), exact.isnan()):
        return float("inf")
    largest = exact.nan_to_num().abs().max().clamp(min=1e-30)
    return float((actual - exact).nan_to_num().abs().max() / largest)
