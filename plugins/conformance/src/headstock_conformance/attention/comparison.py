"""Compare the output of a backend for a case with the expected output."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
import torch
from attrs import evolve
from torch import Tensor

from headstock.spi import AttentionBackend, LayerInfo
from headstock_conformance.attention.cases import AttentionCase, out_dim_of
from headstock_conformance.attention.faults import name_fault
from headstock_conformance.attention.reference import expected

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Tolerance of an element, absolute and relative, by type."""
TOLERANCE_8_BITS = 0.1
"""The same for 8-bit KV: a kernel may round its probabilities to 8 bits too, with 3 bits of
fraction.
"""
GUARD_TOKENS = 2
"""Tokens before and after the output that must stay unchanged."""
GUARD = 7.0


def attend(
    backend: AttentionBackend, case: AttentionCase, layer: LayerInfo, with_lse: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The backend's output for the case.

    raises: AssertionError when it writes to the pool, the queries, the step, or next to the output
    """
    before = {name: array.copy() for name, array in list_inputs(case)}
    layer = evolve(layer, out_dim=out_dim_of(case))
    out, whole = make_guarded_output(case.q, layer)
    lse = torch.full(case.q.shape[:2], math.nan, device=case.q.device) if with_lse else None
    backend.forward(case.q, layer, backend.plan(case.step), out, lse)
    check_guards(whole)
    for name, array in list_inputs(case):
        assert np.array_equal(array, before[name]), f"it writes to {name}, which it may only read"
    return out, lse


def make_guarded_output(q: Tensor, layer: LayerInfo) -> tuple[Tensor, Tensor]:
    """An output of NaN for these queries, and the surrounding tensor with its guards."""
    empty = layer.empty_output(q)
    whole = empty.new_full((len(q) + 2 * GUARD_TOKENS, *empty.shape[1:]), GUARD)
    return whole[GUARD_TOKENS:-GUARD_TOKENS].fill_(math.nan), whole


def check_guards(whole: Tensor) -> None:
    """Raise AssertionError when something was written next to the output."""
    guards = torch.cat([whole[:GUARD_TOKENS], whole[-GUARD_TOKENS:]])
    assert bool((guards == GUARD).all()), "it writes past the ends of the output"


def list_inputs(case: AttentionCase) -> Iterator[tuple[str, np.ndarray]]:
    """All inputs of a backend, as bytes on the host."""
    yield "the pool", to_bytes(case.pool)
    yield "the queries", to_bytes(case.q)
    yield from list_arrays("step", case.step)


def list_arrays(name: str, value: Any) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors and arrays of a step and of its parts."""
    if isinstance(value, Tensor):
        yield name, to_bytes(value)
    elif isinstance(value, np.ndarray):
        yield name, value
    elif isinstance(value, tuple):
        for at, item in enumerate(value):
            yield from list_arrays(f"{name}[{at}]", item)
    elif attrs.has(type(value)):
        for field in attrs.fields(type(value)):
            yield from list_arrays(f"{name}.{field.name}", getattr(value, field.name))


def to_bytes(tensor: Tensor) -> np.ndarray:
    """The tensor's bytes on the host: NaN is equal to itself there."""
    # contiguous: queries may be a strided view, which cannot be viewed as bytes
    raw: np.ndarray = tensor.contiguous().view(torch.uint8).cpu().numpy()
    return raw


def check(
    backend: AttentionBackend,
    case: AttentionCase,
    layer: LayerInfo,
    *,
    with_lse: bool = False,
    tolerance: float | None = None,
) -> float:
    """The largest error of the backend's answer.

    raises: AssertionError that names the fault if the answer matches a known one, else the place
        and size of the error; also if inputs were written
    """
    out, lse = attend(backend, case, layer, with_lse)
    answer, sums = expected(case, layer)
    if lse is not None:
        allowed = 1e-4 if case.q.dtype is torch.float32 else 1e-2
        wrong = find_wrong(lse, sums, allowed, allowed / 10)
        assert not bool(wrong.any()), f"the LSE is wrong: {describe_error(lse, sums, wrong, case)}"
    usual = TOLERANCE[out.dtype] if case.pool.itemsize > 1 else TOLERANCE_8_BITS
    tolerance = tolerance or usual
    wrong = find_wrong(out, answer, tolerance, tolerance)
    if bool(wrong.any()):
        raise AssertionError(explain_error(backend, case, layer, out, answer, wrong, tolerance))
    return float((out.float() - answer).abs().max())


def find_wrong(out: Tensor, answer: Tensor, atol: float, rtol: float) -> Tensor:
    """The elements that exceed the tolerance; NaN always does."""
    assert out.shape == answer.shape, (
        f"shape: expected {tuple(answer.shape)}, got {tuple(out.shape)}"
    )
    return ~torch.isclose(out.float(), answer.float(), atol=atol, rtol=rtol)


def explain_error(
    backend: AttentionBackend,
    case: AttentionCase,
    layer: LayerInfo,
    out: Tensor,
    answer: Tensor,
    wrong: Tensor,
    tolerance: float,
) -> str:
    """The error of an answer: the known fault that gives it, and where it is wrong."""
    text = describe_error(out, answer, wrong, case)
    if not bool(find_wrong(out, answer, 2 * tolerance, 2 * tolerance).any()):
        return f"inexact: {text}, allowed {tolerance:.2g}"  # a known fault deviates more

    def attend_again() -> Tensor:
        again, _ = make_guarded_output(case.q, evolve(layer, out_dim=out_dim_of(case)))
        backend.forward(case.q, layer, backend.plan(case.step), again)
        return again

    fault = name_fault(attend_again, case, layer, tolerance)
    return f"{fault}: {text}" if fault else text


def describe_error(out: Tensor, answer: Tensor, wrong: Tensor, case: AttentionCase) -> str:
    """Where an answer is wrong, and by how much."""
    place = int(wrong.flatten(1).any(1).nonzero()[0])
    row = int(np.searchsorted(np.cumsum(case.step.host_query_lens), place, side="right"))
    lens = case.step.host_query_lens[row], case.step.host_context_lens[row]
    unwritten = int(out.isnan().flatten(1).any(1).sum())
    size = (
        f"{unwritten} of {len(out)} tokens hold NaN"
        if unwritten
        else f"off by up to {float((out.float() - answer.float()).abs().max()):.2g}"
    )
    return f"{size}, first at token {place} of row {row} ({lens[0]} of {lens[1]} tokens)"


def compare(out: Tensor, answer: Tensor, tolerance: float | None = None) -> float:
    """The largest difference; asserts that none is above `tolerance`, by default what the type of
    `out` allows.
    """
    tolerance = tolerance or TOLERANCE[out.dtype]
    worst = float((out.float() - answer).abs().max())
    wrong = find_wrong(out, answer, tolerance, tolerance)
    assert not bool(wrong.any()), f"off by up to {worst:.2g}, allowed {tolerance:.2g}"
    return worst
