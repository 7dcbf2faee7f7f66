"""Rotary positions (Su et al. 2021, arXiv 2104.09864) in GPT-NeoX order, by halves of a head."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from headstock.spi import Rope


@frozen(eq=False)
class CosSin:
    """The rotations of one step's tokens, with the signs of the second half's sine already in.

    cos, sin: [tokens, 1, dim]
    """

    cos: Tensor
    sin: Tensor

    @classmethod
    def at_positions(cls, table: Tensor, positions: Tensor, dtype: torch.dtype) -> CosSin:
        """The table's rows at the positions.

        table: [max_seq_len, 2, dim / 2]
        positions: [tokens] int64
        """
        cos, sin = table[positions].to(dtype).unbind(1)
        return cls(torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None])


def rotate_(x: Tensor, cos_sin: CosSin, out: Tensor) -> None:
    """Turn the first `dim` elements of each head and pass on the others.

    x: [tokens, heads, head_dim]
    writes: out [tokens, heads, head_dim], which may be `x`
    """
    dim = cos_sin.cos.shape[-1]
    if dim < x.shape[-1]:
        out[..., dim:] = x[..., dim:]
        x, out = x[..., :dim], out[..., :dim]
    # The halves swapped; `sin` has the sign that makes a rotation of it. A copy, since `out` may be
    # `x`.
    # By `roll`: `chunk` and `cat` take 5.7 us for 4.8.
    swapped = x.roll(dim // 2, -1)
    torch.mul(x, cos_sin.cos, out=out)
    out.addcmul_(swapped, cos_sin.sin)


def rope_table(rope: Rope, positions: int, max_position: int) -> Tensor:
    """Cosines and sines of positions 0, 1, ..., times the scaling's attention factor.

    returns: [positions, 2, dim / 2] float32
    """
    frequencies, factor = SCALINGS[rope.scaling](rope, max_position, positions)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin()), 1).mul_(factor)


def _default_frequencies(rope: Rope, max_position: int, positions: int) -> tuple[Tensor, float]:
    """Frequencies falling geometrically from 1 to nearly 1 / theta, and a factor of 1.

    frequencies: [dim / 2]
    """
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim
    return 1.0 / rope.theta**exponents, 1.0


def _linear_frequencies(rope: Rope, max_position: int, positions: int) -> tuple[Tensor, float]:
    """All frequencies divided by `factor` (position interpolation, arXiv 2306.15595)."""
    frequencies, _ = _default_frequencies(rope, max_position, positions)
    return frequencies / rope.parameters["factor"], 1.0


def _proportional_frequencies(
    rope: Rope, max_position: int, positions: int
) -> tuple[Tensor, float]:
    """The first of a head's frequencies, divided by `factor`; pairs of the rest do not turn."""
    numbers = rope.parameters
    turned = int(numbers.get("partial_rotary_factor", 1.0) * rope.dim // 2)
    frequencies, _ = _default_frequencies(rope, max_position, positions)
    frequencies[turned:] = 0
    return frequencies / numbers.get("factor", 1.0), 1.0


def _llama3_frequencies(rope: Rope, max_position: int, positions: int) -> tuple[Tensor, float]:
    """Llama 3.1: slow frequencies divided by `factor`, fast ones kept, those between blended."""
    numbers = rope.parameters
    frequencies, _ = _default_frequencies(rope, max_position, positions)
    original = numbers.get("original_max_position_embeddings") or max_position
    turns = original * frequencies / (2 * math.pi)
    low, high = numbers["low_freq_factor"], numbers["high_freq_factor"]
    unscaled = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (unscaled + (1 - unscaled) / numbers["factor"]), 1.0


def _yarn_frequencies(rope: Rope, max_position: int, positions: int) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071): slow frequencies divided by `factor`, and an attention factor."""
    numbers = rope.parameters
    original = numbers.get("original_max_position_embeddings") or max_position
    factor = numbers["factor"]
    low, high = _yarn_range(rope, numbers, original)
    ramp = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    frequencies, _ = _default_frequencies(rope, max_position, positions)
    return frequencies * (1 - ramp) + frequencies / factor * ramp, _yarn_attention_factor(
        numbers, factor
    )


def _long_frequencies(rope: Rope, max_position: int, positions: int) -> tuple[Tensor, float]:
    """LongRoPE (arXiv 2402.13753): each frequency divided by its factor, and an attention factor.

    The long factors are for engines whose sequences may pass the original length.
    """
    # Chosen once. transformers chooses anew in each call, by its longest position; the keys of
    # earlier tokens would then be of another rope.
    numbers = rope.parameters
    original = numbers.get("original_max_position_embeddings") or max_position
    factors = numbers["long_factor" if positions > original else "short_factor"]
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim
    frequencies = 1.0 / (torch.tensor(factors, dtype=torch.float32) * rope.theta**exponents)
    if numbers.get("attention_factor") is not None:
        return frequencies, float(numbers["attention_factor"])
    factor = numbers.get("factor") or max_position / original
    return frequencies, math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def _yarn_range(rope: Rope, numbers: Mapping[str, Any], original: int) -> tuple[float, float]:
    """The pairs between which YaRN blends.

    They rotate `beta_fast` and `beta_slow` times in the original length.
    """

    def pair_index(rotations: float) -> float:
        return (
            rope.dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))
        )

    low, high = (
        pair_index(numbers.get("beta_fast") or 32),
        pair_index(numbers.get("beta_slow") or 1),
    )
    if numbers.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    return low, high if high != low else high + 0.001  # no division by zero in the ramp


def _yarn_attention_factor(numbers: Mapping[str, Any], factor: float) -> float:
    """YaRN's factor of queries and keys: as configured, or 0.1 ln(factor) + 1 as in the paper."""

    def mscale_of(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if numbers.get("attention_factor") is not None:
        return float(numbers["attention_factor"])
    if numbers.get("mscale") and numbers.get("mscale_all_dim"):
        return mscale_of(numbers["mscale"]) / mscale_of(numbers["mscale_all_dim"])
    return mscale_of(1.0)


SCALINGS: Mapping[str, Callable[[Rope, int, int], tuple[Tensor, float]]] = {
    "default": _default_frequencies,
    "dynamic": _default_frequencies,
    "linear": _linear_frequencies,
    "llama3": _llama3_frequencies,
    "longrope": _long_frequencies,
    "proportional": _proportional_frequencies,
    "yarn": _yarn_frequencies,
}
"""Type of scaling in config.json -> `(rope, max_position, positions) -> (frequencies, factor)`.

`max_position` is the model's limit, and `positions` is how many the engine serves.

Dynamic NTK changes frequencies only for sequences beyond `max_position`, and there are none.
"""
