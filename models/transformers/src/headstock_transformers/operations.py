"""The operations of `--ops` that exchanged modules call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from attrs import fields, frozen
from torch import Tensor
from torch.nn import functional as F

from headstock.nn.kv import store_kv_
from headstock.nn.mlp import activate_and_mul
from headstock.nn.norm import head_norm, rms_norm
from headstock.nn.rope import rotate_
from headstock.spi import Batch, Ops, Weight


@frozen(eq=False)
class FineOperations:
    """Operations of `FineTierOps`, found once: a look-up in each call is felt on a CPU."""

    rms_norm: Callable[..., Tensor]
    head_norm: Callable[..., Tensor]
    linear: Callable[..., Tensor]
    activate_and_mul: Callable[..., Tensor]
    rotate_: Callable[..., None]
    store_kv_: Callable[..., None]


# Modules are called by transformers' code, which hands on no operations.
OPERATIONS: ContextVar[FineOperations] = ContextVar("headstock_transformers_operations")


def _rms_norm(x: Tensor, weight: Weight, eps: float) -> Tensor:
    """See `headstock.nn.norm.rms_norm`."""
    return rms_norm(x, weight.tensor, eps)


def _head_norm(x: Tensor, weight: Weight, eps: float) -> Tensor:
    """See `headstock.nn.norm.head_norm`."""
    return head_norm(x, weight.tensor, eps)


def _linear(x: Tensor, weight: Weight, batch: Batch | None) -> Tensor:
    """x W^T + b.   x: [tokens, in]    weight: [out, in]"""
    return F.linear(x, weight.tensor, weight.bias)


PLAIN = FineOperations(
    rms_norm=_rms_norm,
    head_norm=_head_norm,
    linear=_linear,
    activate_and_mul=activate_and_mul,
    rotate_=rotate_,
    store_kv_=store_kv_,
)
"""The operations in torch, which others are equal to."""


def find_operations(ops: Ops) -> FineOperations:
    """The fine operations of a set; torch's for a set that has none."""
    names = [each.name for each in fields(FineOperations)]
    if not all(hasattr(ops, name) for name in names):
        return PLAIN
    return FineOperations(**{name: getattr(ops, name) for name in names})


@contextmanager
def computing_with(operations: FineOperations) -> Iterator[None]:
    """Exchanged modules call these operations as long as the context lasts."""
    token = OPERATIONS.set(operations)
    try:
        yield
    finally:
        OPERATIONS.reset(token)
