"""Weights in words for `quant_words`, and the numbers that these stand for."""

from __future__ import annotations

import torch
from attrs import frozen


@frozen(kw_only=True, eq=False)
class Words:
    """A weight as `words_kernel` reads it."""

    format: str
    j: int
    rows: int
    outs: int
    width: int
    words: torch.Tensor
    extras: torch.Tensor
    factors: torch.Tensor


def _move_bits(codes: torch.Tensor, moves: tuple[tuple[int, int], ...]) -> torch.Tensor:
    """The bits of codes at other places.   moves: bit of the code, bit of the result"""
    result = torch.zeros_like(codes)
    for source, target in moves:
        result |= ((codes >> source) & 1) << target
    return result


def _pack_half(format: str, place: int, codes: torch.Tensor) -> torch.Tensor:
    """A number's bits at their place of 16.   codes: int64"""
    if format == "fp8":
        return codes << (8 - 8 * place)
    if format == "int4":
        return codes << (4 * place)
    if place == 3:
        return _move_bits(codes, ((3, 14), (2, 13), (1, 11), (0, 10)))
    shift = 3 * place
    return _move_bits(codes, ((3, 15 - shift), (2, 8 - shift), (1, 7 - shift), (0, 6 - shift)))


def pack_words(format: str, codes: torch.Tensor, j: int, rows: int) -> torch.Tensor:
    """[tiles, units, rows, j] int32.   codes: [outs, width] uint8, a number each"""
    (outs, width), slices = codes.shape, 4 if format == "fp8" else 8
    wide = codes.to(torch.int64).view(outs // rows, rows, width // (slices * j), slices, j)
    words = torch.zeros(*wide.shape[:3], j // 2, 2, dtype=torch.int64, device=codes.device)
    for number in range(slices):
        word, place = number // (slices // 2), number % (slices // 2)
        pair = _pack_half(format, place, wide[:, :, :, number].unflatten(-1, (-1, 2)))
        words[..., word] |= pair[..., 0] | pair[..., 1] << 16
    return words.flatten(-2).transpose(1, 2).to(torch.int32).contiguous()


def _pack_extras(extras: torch.Tensor, j: int, rows: int, slices: int) -> torch.Tensor:
    """[tiles, units, words, rows].   extras: [outs, width / 128] int64"""
    outs, count = extras.shape
    size = slices * j // 128
    wide = extras.view(outs // rows, rows, count // size, size).permute(0, 2, 3, 1)
    return wide.to(torch.int32).contiguous()


def quantize_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, no extras, factors by row."""
    scale = weight.float().abs().amax(1) / 448
    codes = (weight.float() / scale[:, None]).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes, codes.new_empty(len(codes), 0), scale


def quantize_int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes; scale and zero + 128 as halves of a word for each 128 inputs; no factors."""
    groups = weight.float().unflatten(1, (-1, 128))
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scale = ((high - low) / 15).clamp(min=1e-6).to(torch.bfloat16)
    zero = (-low / scale.float()).round().clamp(0, 15)
    codes = (groups / scale.float()[..., None] + zero[..., None]).round().clamp(0, 15)
    halves = [
        each.to(torch.bfloat16).view(torch.int16).to(torch.int64) & 0xFFFF
        for each in (scale, zero + 128)
    ]
    return codes.flatten(1).to(torch.uint8), halves[0] << 16 | halves[1], scale.new_ones(len(codes))


def quantize_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes; exponents of bfloat16 for each 32 inputs, four in a word; factors by row.

    A number's bits make it 2^126 times too small, which its exponent has too.
    """
    groups = weight.float().unflatten(1, (-1, 32))
    power = groups.abs().amax(2).clamp(min=1e-30).log2().floor() - 2
    most = power.amax(1, keepdim=True).clamp(min=0)
    numbers = groups / 2.0 ** power[..., None]
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=weight.device)
    middles = (levels[1:] + levels[:-1]) / 2
    codes = torch.bucketize(numbers.abs(), middles) | (numbers < 0).to(torch.int64) << 3
    exponents = (power - most + 126 + 127).clamp(1, 254).to(torch.int64).unflatten(1, (-1, 4))
    shifts = torch.arange(0, 32, 8, device=weight.device)
    return codes.flatten(1).to(torch.uint8), (exponents << shifts).sum(-1), 2.0 ** most[:, 0]


QUANTIZE = {"fp8": quantize_fp8, "int4": quantize_int4, "mxfp4": quantize_mxfp4}


def prepare(format: str, weight: torch.Tensor, j: int, rows: int) -> Words:
    """The weight in words.   weight: [outs, width], multiples of `rows` and of a unit"""
    codes, extras, factors = QUANTIZE[format](weight)
    words = pack_words(format, codes, j, rows)
    if format != "fp8":
        extras = _pack_extras(extras, j, rows, 8)
    return Words(
        format=format,
        j=j,
        rows=rows,
        outs=len(weight),
        width=weight.shape[1],
        words=words,
        extras=extras if format != "fp8" else words.new_zeros(1),
        factors=factors.float().contiguous(),
    )


def dequantize(format: str, weight: torch.Tensor) -> torch.Tensor:
    """The numbers that the words stand for, in float32."""
    codes, extras, factors = QUANTIZE[format](weight)
    if format == "fp8":
        return codes.view(torch.float8_e4m3fn).float() * factors[:, None]
    wide = codes.to(torch.int64)
    if format == "int4":
        scale = (extras >> 16).to(torch.int16).view(torch.bfloat16).float()
        zero = (extras & 0xFFFF).to(torch.int16).view(torch.bfloat16).float() - 128
        numbers = wide.float().unflatten(1, (-1, 128)) - zero[..., None]
        return (numbers * scale[..., None]).flatten(1)
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=weight.device)
    numbers = levels[wide & 7] * (1 - 2 * (wide >> 3))
    shifts = torch.arange(0, 32, 8, device=weight.device)
    power = ((extras[..., None] >> shifts) & 0xFF).flatten(1) - 253
    numbers = numbers.unflatten(1, (-1, 32)) * 2.0 ** power[..., None].float()
    return numbers.flatten(1) * factors[:, None]
