"""The cases of sizes: many layers, rows, tokens and calls, large scores, and engines that end."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from headstock.spi import Feature, LayerInfo, Phase
from headstock_conformance.attention.cases import AttentionCase, add_sinks, out_dim_of
from headstock_conformance.attention.comparison import check, compare
from headstock_conformance.attention.reference import expected
from headstock_conformance.attention.state_checks import MakeCase, attend_with, row_lens
from headstock_conformance.attention.subject import Subject

NUM_LAYERS = 40
NUM_ROWS = {Phase.DECODE: 300, Phase.EXTEND: 150, Phase.PREFILL: 100}
LONG = {
    Phase.DECODE: [(1, 1025), (1, 8200), (1, 3), (1, 2049), (1, 4100)],
    Phase.EXTEND: [(5, 8200), (3, 3), (70, 2100), (1300, 2900)],
    Phase.PREFILL: [(2100, 2100), (2, 2)],
}
"""Rows (query tokens, context tokens); some are long."""
NUM_CALLS = 1030
MOST_KEPT = 64
"""Tensors that a backend may have more of after many calls than after some."""
LARGE_SCORE = 1228.8
LARGE = 64.0
"""An element of queries and keys, a power of 2: its square times the scale of `LARGE_SCALE` is
`LARGE_SCORE`, of which no type of floats that computes softmax has the exponential.
"""
LARGE_SCALE = 0.3
LARGE_TOLERANCE = 0.05
"""Sums of large scores round off more; an overflow gives NaN."""


def list_size_cases(
    subject: Subject, make_case: MakeCase, layer: LayerInfo, *, contiguous: bool
) -> Iterator[tuple[str, Callable[[], object]]]:
    """The cases of sizes, for one layout.

    make_case: makes rows of few heads
    """
    phases = sorted(subject.claims.phases, key=lambda phase: phase.value)

    def bind(work: Callable[..., object], *more: Any) -> Callable[[], object]:
        return partial(work, subject, make_case, *more, contiguous)

    for phase in phases:
        for text, features, changed in list_features(subject, layer):
            yield f"{phase.value}: many rows{text}", bind(check_rows, changed, phase, features)
            if not contiguous:
                yield f"{phase.value}: long rows{text}", bind(check_long, changed, phase, features)
        yield f"{phase.value}: large scores", bind(check_large, layer, phase)
    first = phases[0]
    yield f"{first.value}: many layers of their own pools", bind(check_pools, layer, first)
    yield f"{first.value}: {NUM_CALLS} calls", bind(check_calls, layer, first)
    yield f"{first.value}: an engine ends beside another", bind(check_close, layer, first)


def list_features(
    subject: Subject, layer: LayerInfo
) -> Iterator[tuple[str, frozenset[Feature], LayerInfo]]:
    """Without any feature, and with all claimed ones of window, softcap, sinks and LSE."""
    yield "", frozenset(), layer
    values: dict[Feature, dict[str, Any]] = {
        Feature.SLIDING_WINDOW: {"window": 1100},
        Feature.SOFTCAP: {"softcap": 0.7},
    }
    features = subject.claims.features & {*values, Feature.SINKS, Feature.LSE}
    if features:
        changes = {name: value for each in features for name, value in values.get(each, {}).items()}
        yield " with every feature", features, evolve(layer, **changes)


def with_sinks_of(features: frozenset[Feature], layer: LayerInfo, case: AttentionCase) -> LayerInfo:
    """The layer, with sinks for the case's heads if they are among the features."""
    return add_sinks(layer, case.q.shape[1], case.q.device) if Feature.SINKS in features else layer


def check_rows(
    subject: Subject,
    make_case: MakeCase,
    layer: LayerInfo,
    phase: Phase,
    features: frozenset[Feature],
    contiguous: bool,
) -> None:
    """A step of hundreds of rows."""
    count = NUM_ROWS[phase] if not contiguous else 40
    lens = row_lens(phase, *(1 + 7 * row % 37 for row in range(count)))
    case = make_case(phase, subject.device, lens)
    layer = with_sinks_of(features, layer, case)
    backend = subject.open(case, [layer], features=features, contiguous=contiguous, max_rows=count)
    check(backend, case, layer, with_lse=Feature.LSE in features)
    backend.close()


def check_long(
    subject: Subject,
    make_case: MakeCase,
    layer: LayerInfo,
    phase: Phase,
    features: frozenset[Feature],
    contiguous: bool,
) -> None:
    """Rows of thousands of tokens."""
    case = make_case(phase, subject.device, LONG[phase])
    layer = with_sinks_of(features, layer, case)
    longest = max(context for _, context in LONG[phase])
    backend = subject.open(
        case, [layer], features=features, contiguous=contiguous, max_seq_len=longest + 100
    )
    check(backend, case, layer, with_lse=Feature.LSE in features)
    backend.close()


def check_large(
    subject: Subject, make_case: MakeCase, layer: LayerInfo, phase: Phase, contiguous: bool
) -> None:
    """Scores whose exponentials are infinite, or all 0: a softmax needs their maximum."""
    layer = evolve(layer, scale=LARGE_SCALE)
    for sign in (1, -1):
        case = make_case(phase, subject.device, row_lens(phase, 40, 1, 90))
        for keys in case.keys:
            keys[..., 0] = LARGE
        case.pool[..., 0].masked_fill_(~case.pool[..., 0].isnan(), LARGE)
        if case.pool.dim() == 5:
            for values in case.values:
                values[..., 0] = LARGE
        else:
            case = evolve(case, values=tuple(keys[..., : out_dim_of(case)] for keys in case.keys))
        case.q[..., 0] = sign * LARGE
        backend = subject.open(case, [layer], contiguous=contiguous)
        out = attend_with(backend, case, layer, backend.plan(case.step))
        text = f"scores of about {sign * LARGE_SCORE:.0f}: "
        wrong = int((~out.isfinite()).flatten(1).any(1).sum())
        assert not wrong, (
            f"{text}{wrong} of {len(out)} tokens are not finite; subtract the maximum of the "
            "scores before their exponentials"
        )
        try:
            compare(out, expected(case, layer)[0], LARGE_TOLERANCE)
        except AssertionError as error:
            raise AssertionError(f"{text}{error}") from error
        backend.close()


def make_layers(case: AttentionCase, layer: LayerInfo) -> list[tuple[LayerInfo, AttentionCase]]:
    """Layers with separate pools, whose vectors are those of the case rolled and multiplied.

    The indices have gaps, as in models with layers without attention.
    """
    layers = []
    for number in range(NUM_LAYERS):

        def change(side: Tensor, shift: int = number) -> Tensor:
            # Powers of 2, which round nothing: no two layers have the same numbers.
            return side.roll(shift, -1) * (-0.5) ** (shift // side.shape[-1])

        own = evolve(layer, index=number + number // 3)
        keys = tuple(map(change, case.keys))
        values = (
            tuple(map(change, case.values))
            if case.pool.dim() == 5
            else tuple(side[..., : out_dim_of(case)] for side in keys)
        )
        layers.append((own, evolve(case, pool=change(case.pool), keys=keys, values=values)))
    return layers


def check_pools(
    subject: Subject, make_case: MakeCase, layer: LayerInfo, phase: Phase, contiguous: bool
) -> None:
    """Each of many layers reads its own pool, by one plan."""
    case = make_case(phase, subject.device, row_lens(phase, 20, 3))
    layers = make_layers(case, layer)
    pools = {info.index: own.pool for info, own in layers}
    backend = subject.open(
        case, [info for info, _ in layers], contiguous=contiguous, layer_pools=pools
    )
    plan = backend.plan(case.step)
    # Last layer first, to detect a backend that keeps data of the first call too.
    for info, own in [*reversed(layers), *layers]:
        out = attend_with(backend, own, info, plan)
        try:
            compare(out, expected(own, info)[0])
        except AssertionError as error:
            others = [index for index, pool in pools.items() if is_answer_of(out, own, pool, info)]
            cause = f"it reads the pool of layer {others[0]}" if others else "its answer is wrong"
            raise AssertionError(
                f"layer {info.index} of {len(layers)} with pools of their own: {cause}: {error}"
            ) from error
    backend.close()


def is_answer_of(out: Tensor, own: AttentionCase, pool: Tensor, layer: LayerInfo) -> bool:
    """Whether an answer is that of the same step over another layer's pool."""
    if pool is own.pool:
        return False
    table = own.step.page_tables[layer.group].long()
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for row, length in enumerate(own.step.host_context_lens.tolist()):
        pages = pool[table[row]]
        sides = (pages, pages) if pool.dim() == 3 else (pages[:, 0], pages[:, 1])
        for kept, side in zip((keys, values), sides, strict=True):
            flat = side.flatten(0, 1)[:length].float()
            kept.append(flat[:, None] if pool.dim() == 3 else flat)
    values = [side[..., : own.values[0].shape[-1]] for side in values]
    other = evolve(own, pool=pool, keys=tuple(keys), values=tuple(values))
    return bool(torch.allclose(out.float(), expected(other, layer)[0], atol=0.05, rtol=0.05))


def check_calls(
    subject: Subject, make_case: MakeCase, layer: LayerInfo, phase: Phase, contiguous: bool
) -> None:
    """Over a thousand steps give the same results as the first ones, and leak nothing."""
    # Of one shape, so that one pool and one backend serve them in turn.
    case = make_case(phase, subject.device, row_lens(phase, 9, 4, 30))
    backend = subject.open(case, [layer], contiguous=contiguous)
    queries = [case.q, case.q.flip(0) * 0.5, -case.q]
    answers = [expected(evolve(case, q=q), layer)[0] for q in queries]
    num_tensors = 0
    for number in range(NUM_CALLS):
        which = number % len(queries)
        step = evolve(case.step)
        out = attend_with(backend, evolve(case, q=queries[which]), layer, backend.plan(step))
        try:
            compare(out, answers[which])
        except AssertionError as error:
            raise AssertionError(f"call {number + 1}: {error}") from error
        if number == NUM_CALLS // 2:
            num_tensors = count_tensors()
    more = count_tensors() - num_tensors
    assert more <= MOST_KEPT, (
        f"{more} tensors more are alive after {NUM_CALLS} calls than after half of them: the "
        "backend keeps what it should free"
    )
    backend.close()


def count_tensors() -> int:
    """How many tensors are alive."""
    gc.collect()
    return sum(issubclass(type(each), Tensor) for each in gc.get_objects())


def check_close(
    subject: Subject, make_case: MakeCase, layer: LayerInfo, phase: Phase, contiguous: bool
) -> None:
    """A backend keeps working when another one closes, whichever was made first; so does a new
    one."""

    def open_one(*contexts: int) -> tuple[Any, AttentionCase, Any]:
        case = make_case(phase, subject.device, row_lens(phase, *contexts))
        backend = subject.open(case, [layer], contiguous=contiguous)
        attend_with(backend, case, layer, backend.plan(case.step))
        return backend, case, backend.plan(case.step)

    def check_one(opened: tuple[Any, AttentionCase, Any], text: str) -> None:
        backend, case, plan = opened
        try:
            compare(attend_with(backend, case, layer, plan), expected(case, layer)[0])
        except Exception as error:
            raise AssertionError(f"{text}: {type(error).__name__}: {error}") from error

    for closed in (0, 1):
        opened = [open_one(40, 3), open_one(5, 90, 17)]
        opened[closed][0].close()
        other, case, _ = opened[1 - closed]
        check_one(opened[1 - closed], "a backend is wrong after another one was closed")
        new = open_one(7, 8, 33)
        check_one(new, "a backend that was made after another one was closed is wrong")
        opened[1 - closed] = other, case, other.plan(case.step)
        check_one(opened[1 - closed], "a backend is wrong after another one was closed")
        other.close()
        new[0].close()
