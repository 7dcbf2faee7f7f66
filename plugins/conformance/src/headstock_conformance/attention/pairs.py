"""Steps in which every pair of claims of a backend occurs at least once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import Any

from attrs import evolve

from headstock.errors import CannotRun
from headstock.spi import Feature, LayoutKind, Phase
from headstock_conformance.attention.shapes import (
    HEAD_DIMS,
    LAYER,
    PAGE_SIZES,
    RATIOS,
    REGION,
    SCALE,
    CaseOptions,
    Named,
    Shape,
    compare_case,
)
from headstock_conformance.attention.subject import Subject, sample_set
from headstock_conformance.case import explain_failure

Choice = tuple[str, int]
"""An axis, and the place of one of its values."""


def cover_pairs(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """A small set of combinations that contains every pair of values of two axes."""
    choices = [(name, place) for name, values in axes.items() for place in range(len(values))]
    missing = {
        frozenset((one, other)) for one, other in combinations(choices, 2) if one[0] != other[0]
    }
    chosen_sets = []
    while missing:
        # In a fixed order, so that the cases are the same in every process.
        first = min(sorted(pair) for pair in missing)
        chosen = dict(first)
        for name, values in axes.items():
            if name not in chosen:
                chosen[name] = _choose_place(name, len(values), chosen, missing)
        missing -= {frozenset(pair) for pair in combinations(chosen.items(), 2)}
        chosen_sets.append(chosen)
    return [{name: values[chosen[name]] for name, values in axes.items()} for chosen in chosen_sets]


def _choose_place(
    name: str, count: int, chosen: Mapping[str, int], missing: set[frozenset[Choice]]
) -> int:
    """The value of an axis that covers the most missing pairs with the chosen values."""

    def count_missing(place: int) -> int:
        return sum(frozenset(((name, place), each)) in missing for each in chosen.items())

    return max(range(count), key=count_missing)


def list_pairs(subject: Subject, shape: Shape, head: str) -> Iterator[Named]:
    """Steps of every pair of claims, for one layout."""
    claims, is_full = subject.claims, shape.layout is LayoutKind.FULL
    sizes = sample_set(claims.page_sizes, PAGE_SIZES, 3) if claims.paged else []
    features = claims.features
    axes: dict[str, Sequence[Any]] = {
        "page_size": [*sizes, *([REGION] if claims.contiguous else [])],
        "dtypes": [
            (q, kv) for q, kv, out in sorted(claims.dtypes) if q == out and (is_full or q == kv)
        ],
        "window": [None, 9, 40] if Feature.SLIDING_WINDOW in features else [None],
        "softcap": [0.0, 0.7] if Feature.SOFTCAP in features else [0.0],
        "sinks": [False, True] if Feature.SINKS in features else [False],
        "lse": [False, True] if Feature.LSE in features else [False],
        "group": [0, 1],
        "scale": [SCALE, 0.05],
    }
    if is_full:
        axes["head_dim"] = sample_set(claims.head_dims, HEAD_DIMS, 3)
        axes["ratio"] = sample_set(claims.gqa_ratios, RATIOS, 3)
        axes["kv_heads"] = [shape.kv_heads, 8]
    for phase in sorted(claims.phases, key=lambda phase: phase.value):
        yield (
            f"{head}{phase.value}: every two claims together",
            partial(compare_pairs, subject, shape, phase, cover_pairs(axes)),
        )


def compare_pairs(
    subject: Subject, shape: Shape, phase: Phase, chosen: Sequence[Mapping[str, Any]]
) -> None:
    """Compare steps of several claims at once, except those that the plugin refuses here.

    raises: CannotRun when it refuses all
    """
    refusals = []
    for values in chosen:
        names = ("page_size", "head_dim", "ratio", "kv_heads")
        sizes = {name: values[name] for name in names if name in values}
        q, kv = values["dtypes"]
        layer = evolve(
            LAYER,
            **{name: values[name] for name in ("window", "softcap", "group", "scale")},
        )
        claimed = {
            Feature.SLIDING_WINDOW: layer.window is not None,
            Feature.SOFTCAP: layer.softcap > 0,
            Feature.SINKS: values["sinks"],
            Feature.LSE: values["lse"],
        }
        options = CaseOptions(
            layer=layer,
            features=frozenset(feature for feature, is_used in claimed.items() if is_used),
            with_lse=values["lse"],
            with_sinks=values["sinks"],
            contiguous=values["page_size"] == REGION,
            groups=2 if layer.group else 1,
        )
        try:
            compare_case(subject, evolve(shape, dtype=q, kv_dtype=kv, **sizes), phase, options)
        except CannotRun as error:
            refusals.append(error)
        except Exception as error:
            text = ", ".join(f"{name} {value}" for name, value in values.items())
            raise AssertionError(f"{explain_failure(error)} (with {text})") from error
    if refusals and len(refusals) == len(chosen):
        raise refusals[0]
