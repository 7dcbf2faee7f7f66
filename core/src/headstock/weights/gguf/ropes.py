"""Scaled positions of a GGUF file, in the words of a config.json."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headstock.errors import shorten
from headstock.weights.gguf.header import HeaderError
from headstock.weights.gguf.metadata import Metadata

ROPE_FACTORS = "rope_freqs.weight"
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
FACTORS = (ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS)
"""The tensors with what each pair of a head is slowed down by."""
ATTENTION_FACTOR = "rope.scaling.attn_factor"

_DEFAULT_BASE = 10000.0

_LOW, _HIGH, _ORIGINAL = 1.0, 4.0, 8192
"""The numbers of Llama 3 beside its factor, which files have only as what follows from them."""

_TOLERANCE = 1e-4


def translate_ropes(
    metadata: Metadata,
    name: str,
    head_dim: int,
    rope_dim: int,
    factors: Mapping[str, Sequence[float]],
    *,
    has_lists: bool,
) -> Mapping[str, Any]:
    """The fields for positions.

    name: that of the architecture    rope_dim: the part of a head that is turned
    factors: the numbers of those of `FACTORS` that the file has
    has_lists: whether texts longer than those of the training have a list of their own
    raises: HeaderError
    """
    base = metadata.find_number(f"{name}.rope.freq_base")
    base = _DEFAULT_BASE if base is None else base
    if not base > 0:
        raise HeaderError(f"{name}.rope.freq_base: expected a number above 0, got {base}")
    kind = metadata.find_text(f"{name}.rope.scaling.type") or "none"
    factor = metadata.find_number(f"{name}.rope.scaling.factor")
    original = metadata.find_count(f"{name}.rope.scaling.original_context_length")
    fields: dict[str, Any] = {"rope_theta": base}
    if rope_dim != head_dim:
        fields["partial_rotary_factor"] = rope_dim / head_dim
    if factors:
        if kind != "none":
            raise HeaderError(f"{name}.rope.scaling.type: expected none beside {min(factors)}")
        if ROPE_FACTORS in factors:
            scaling = _recognize_llama3(factors[ROPE_FACTORS], base, head_dim)
            return fields | {"rope_scaling": scaling}
        if not has_lists:
            raise HeaderError(f"{min(factors)} is not read for the architecture {name}")
        return {**fields, **_translate_lists(metadata, name, rope_dim, original, factors)}
    if has_lists and original and original < metadata.read_count(f"{name}.context_length"):
        # Converters have left them out without a word.
        raise HeaderError(
            f"{name}.context_length is longer than {name}.rope.scaling.original_context_length, "
            f"and {SHORT_FACTORS} and {LONG_FACTORS} are missing"
        )
    if original:
        fields["original_max_position_embeddings"] = original
    # Files have a factor of 0 or 1 for none.
    if kind == "none" or not factor or factor == 1:
        return fields
    if kind not in ("linear", "yarn"):
        raise HeaderError(
            f"{name}.rope.scaling.type: expected none, linear or yarn, got {shorten(kind)}"
        )
    scaling = {"rope_type": kind, "factor": factor}
    if kind == "yarn" and original:
        scaling["original_max_position_embeddings"] = original
    return fields | {"rope_scaling": scaling}


def _translate_lists(
    metadata: Metadata,
    name: str,
    rope_dim: int,
    original: int | None,
    factors: Mapping[str, Sequence[float]],
) -> Mapping[str, Any]:
    """The fields for short and long texts of their own factors.   raises: HeaderError"""
    lists = {"short_factor": SHORT_FACTORS, "long_factor": LONG_FACTORS}
    scaling: dict[str, Any] = {"rope_type": "longrope"}
    for field, tensor in lists.items():
        found = factors.get(tensor, ())
        if len(found) != rope_dim // 2:
            raise HeaderError(f"{tensor}: expected {rope_dim // 2} numbers, got {len(found)}")
        scaling[field] = list(found)
    if not original:
        raise HeaderError(f"{name}.rope.scaling.original_context_length is missing beside them")
    factor = metadata.find_number(f"{name}.{ATTENTION_FACTOR}")
    if factor is not None:
        scaling["attention_factor"] = factor
    return {"rope_scaling": scaling, "original_max_position_embeddings": original}


def _recognize_llama3(factors: Sequence[float], base: float, head_dim: int) -> Mapping[str, Any]:
    """The table of Llama 3 from which these factors follow.   raises: HeaderError"""
    factor = max(factors, default=0.0)
    if len(factors) != head_dim // 2 or not math.isfinite(factor) or factor < 1 or base <= 1:
        raise HeaderError(
            f"rope_freqs.weight: expected {head_dim // 2} numbers from 1 on, got {len(factors)}, "
            f"the largest of them {factor:g}"
        )
    expected = _list_factors(factor, base, head_dim)
    pairs = zip(expected, factors, strict=True)
    if not all(math.isclose(one, other, rel_tol=_TOLERANCE) for one, other in pairs):
        raise HeaderError(
            "rope_freqs.weight holds other factors than those of Llama 3, and only these are read "
            "from GGUF"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH,
        "original_max_position_embeddings": _ORIGINAL,
    }


def _list_factors(factor: float, base: float, head_dim: int) -> Iterator[float]:
    """What Llama 3 slows each pair down by: slow ones whole, quick ones not at all."""
    for pair in range(head_dim // 2):
        turns = _ORIGINAL / (2 * math.pi * base ** (2 * pair / head_dim))
        share = min(1.0, max(0.0, (turns - _LOW) / (_HIGH - _LOW)))
        yield 1 / (share + (1 - share) / factor)
