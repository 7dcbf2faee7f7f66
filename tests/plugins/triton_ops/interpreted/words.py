"""Maps in words and tokens in two numbers of FP8, against the numbers that these stand for."""

from __future__ import annotations

from typing import Any

import ops_cases as cases
import pytest
import torch
from attrs import evolve
from often import often
from packed_cases import HOPPER, LAYER, configure, draw_format, make_ops, pack_rows
from torch import Tensor

from headstock.ops.torch_ops import TorchOps
from headstock.spi import Activation, ParamSpec, Role, Weight, WeightFormat, WeightKind
from headstock_conformance.ops.cases import config_of
from headstock_conformance.ops.packed import pack_blocks
from headstock_triton import packed
from headstock_triton.activation import fused_silu_and_mul, quantize_silu_and_mul
from headstock_triton.fp8_linear import Fp8Map, multiply_exact_rows
from headstock_triton.fp8_parts import choose_rounded_tile, multiply_in_rounded_parts
from headstock_triton.fp8_rows import Fp8Rows, RowForm, quantize_rows
from headstock_triton.norm import add_norm, quantize_norm
from headstock_triton.ops import TritonOps
from headstock_triton.options import TritonOptions
from headstock_triton.split_sums import PartTile, choose_part_tile
from headstock_triton.word_linear import multiply_words
from headstock_triton.word_maps import WordMap, unpack_words

DTYPE = torch.bfloat16
INT4, FP4, FP8 = WeightKind.INT4, WeightKind.FP4_E2M1, WeightKind.FP8_E4M3
WORDS = (
    WeightFormat(kind=INT4, group=(1, 128), has_zeros=True),
    WeightFormat(kind=FP4, group=(1, 32)),
    WeightFormat(kind=WeightKind.INT8),
    WeightFormat(kind=INT4, group=(1, 32)),
    WeightFormat(kind=INT4, group=(1, 512), has_zeros=True),
    WeightFormat(kind=INT4),
)
ROWS = (WeightFormat(kind=FP8, group=(1, 256)), WeightFormat(kind=FP8, group=(16, 128)))
CUT = PartTile(rows=64, tokens=16, parts=2, warps=4, stages=4)
TWICE = PartTile(rows=64, tokens=32, parts=1, warps=4, stages=3)


def noise(*shape: int, **more: Any) -> Tensor:
    return cases.noise(*shape, dtype=DTYPE, device="cpu", **more)


def is_near(found: Tensor, expected: Tensor, *, off: float = 0.004) -> bool:
    return bool((found.double() - expected).norm() < off * expected.norm())


@pytest.mark.parametrize("factor", often(1, [1, 1 + 2**-9, 1 / 3]))
@pytest.mark.parametrize("format", often(3, WORDS), ids=str)
def test_words_stand_for_the_numbers_of_the_map(format: WeightFormat, factor: float) -> None:
    """factor: with it, bfloat16 has not all scales, or no type of 16 bits has."""
    outs, width = 96, 512
    stored, plain = draw_format(outs, width, format, bias=noise(outs, seed=5))
    assert stored.scales is not None
    stored, plain = evolve(stored, scales=stored.scales * factor), plain * factor
    weight = packed.prepare_map(stored, DTYPE)
    assert isinstance(weight, WordMap)
    assert weight.nbytes < 2 * stored.tensor.nbytes

    close = {"rtol": 2**-10 if factor == 1 / 3 else 1e-6, "atol": 1e-6}
    torch.testing.assert_close(unpack_words(weight, torch.float32).double(), plain, **close)
    bare = evolve(weight, bias=None)
    assert weight.bias is not None
    for tokens, tile in ((1, None), (3, CUT), (40, None), (70, None), (35, TWICE)):
        x = noise(tokens, width)
        exact = x.double() @ plain.T
        whole = exact + weight.bias.double()
        assert is_near(multiply_words(x, weight, tile=tile), whole)
        parts = multiply_words(x, bare, left=True, tile=tile)
        assert is_near(parts.sum(0) if parts.dim() == 3 else parts, exact)
        activated = TorchOps().activate_and_mul(whole, Activation.SILU)
        assert is_near(multiply_words(x, weight, gated=True, tile=tile), activated, off=0.01)
        assert not weight.counters.any(), "a counter was not set back"


def test_words_are_read_up_to_the_number_of_tokens_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stored, plain = draw_format(64, 512, WORDS[0])
    read: list[int] = []
    multiply = packed.multiply_words

    def note(x: Tensor, *arguments: Any, **more: Any) -> Tensor:
        read.append(len(x))
        return multiply(x, *arguments, **more)

    monkeypatch.setattr(packed, "multiply_words", note)
    for most in (64, 80):
        weight = packed.prepare_map(stored, DTYPE, word_tokens=most)
        for tokens in (64, 65, 81):
            x = noise(tokens, 512)
            assert is_near(packed.multiply_packed(x, weight), x.double() @ plain.T)

    assert read == [64, 64, 65]


@pytest.mark.parametrize("format", often(1, ROWS), ids=str)
def test_exact_rows_are_multiplied_by_maps_in_fp8(format: WeightFormat) -> None:
    outs, width = 80, 256
    stored, plain = draw_format(outs, width, format, bias=noise(outs, seed=5))
    weight = packed.prepare_map(stored, DTYPE)
    assert isinstance(weight, Fp8Map) and weight.bias is not None
    for tokens, tile in ((1, None), (3, CUT), (40, None)):
        x = noise(tokens, width)
        exact, rows = x.double() @ plain.T, quantize_rows(x, RowForm.EXACT)
        assert is_near(multiply_exact_rows(rows, weight, tile=tile), exact + weight.bias.double())
        parts = multiply_exact_rows(rows, evolve(weight, bias=None), left=True, tile=tile)
        assert is_near(parts.sum(0) if parts.dim() == 3 else parts, exact)
        assert not weight.counters.any(), "a counter was not set back"


@pytest.mark.parametrize("parts", [2, 4])
def test_rounded_rows_are_multiplied_in_parts(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By 132 processors, and for every row of two blocks of tokens with its own scale."""
    outs, width = 8192 // parts, 512
    stored, _ = draw_format(outs, width, WeightFormat(kind=FP8, group=(1, width)))
    weight = packed.prepare_map(stored, DTYPE)
    assert weight.scales is not None
    x = noise(67, width) * torch.rand(67, 1, generator=torch.Generator().manual_seed(1))
    rows = quantize_rows(x.to(DTYPE))
    exact = (rows.values.double() * rows.scales) @ (
        weight.tensor.double() * weight.scales[:, None]
    ).T
    monkeypatch.setattr(packed, "count_processors", lambda device: 132)
    found = packed.multiply_quantized(rows, weight, left=True)
    assert found.shape == (parts, 67, outs) and found.dtype == torch.float32
    assert is_near(found.sum(0), exact, off=1e-5)

    two_blocks = PartTile(rows=64, tokens=32, parts=parts, warps=4, stages=2)
    again = multiply_in_rounded_parts(rows, weight, two_blocks)
    assert is_near(again.sum(0), exact, off=1e-5)
    assert is_near(again[0], _multiply_columns(rows, weight, width // parts), off=1e-5)


def _multiply_columns(rows: Fp8Rows, weight: Weight, columns: int) -> Tensor:
    """The product of the first columns."""
    assert weight.scales is not None
    x, w = rows.values[:, :columns].double(), weight.tensor[:, :columns].double()
    return (x @ w.T) * rows.scales * weight.scales


@pytest.mark.parametrize(
    ("tokens", "outs", "width", "tile"),
    [
        (65, 4096, 12_288, (64, 2)),
        (128, 4096, 4096, (64, 2)),
        (129, 4096, 4096, (128, 2)),
        (256, 4096, 12_288, (128, 2)),
        (257, 4096, 4096, None),
        (100, 2048, 4096, (64, 4)),
        (100, 5120, 17_408, (128, 2)),
        (200, 5120, 17_408, None),
        (100, 6144, 4096, (128, 2)),
        (100, 24_576, 4096, None),
        (100, 4000, 4096, None),
        (100, 4096, 4000, None),
        (100, 4096, 128, None),
    ],
)
def test_products_are_in_parts_where_these_fill_the_processors(
    tokens: int, outs: int, width: int, tile: tuple[int, int] | None
) -> None:
    found = choose_rounded_tile(tokens, outs, width, processors=132)
    assert (found and (found.rows, found.parts)) == tile


def widen(rows: Fp8Rows) -> Tensor:
    """The numbers that exact rows stand for."""
    coarse, rest = rows.values.float()
    return (coarse + rest / 16) * rows.scales


def test_rows_by_group_have_a_scale_for_each_128_columns() -> None:
    """A group has the numbers of a row of its own; more rows are padding."""
    x, gain, gate_up = noise(37, 384, scale=20.0), noise(384, seed=2), noise(37, 768, seed=3)
    x[3, 128:256] *= 1e4
    plain = (x, add_norm(x.clone(), None, gain, 1e-6), fused_silu_and_mul(gate_up))
    made = (
        quantize_rows(x, RowForm.BY_GROUP),
        quantize_norm(x.clone(), None, gain, 1e-6, RowForm.BY_GROUP),
        quantize_silu_and_mul(gate_up, RowForm.BY_GROUP),
    )
    for rows, numbers in zip(made, plain, strict=True):
        assert rows.values.shape == (64, 384) and rows.tokens == 37
        assert rows.scales.shape == (64, 3) and rows.scales.stride() == (1, 64)
        for group in range(3):
            part = slice(group * 128, (group + 1) * 128)
            alone = quantize_rows(numbers[:, part].contiguous())
            assert torch.equal(rows.scales[:37, group], alone.scales[:, 0])
            found = rows.values[:37, part]
            assert torch.equal(found.view(torch.uint8), alone.values.view(torch.uint8))


@pytest.mark.filterwarnings("ignore:invalid value encountered in divide")
def test_exact_rows_are_the_numbers_of_bfloat16() -> None:
    x = noise(6, 300, scale=4.0) * noise(6, 300, seed=1).exp() ** 3
    x[1], x[2], x[3], x[4, 0] = 0, x[2] * 1e-20, x[3] * 1e20, 1e4

    largest = x.float().abs().amax(1, keepdim=True)
    assert bool(((widen(quantize_rows(x, RowForm.EXACT)) - x).abs() <= largest * 2.0**-21).all())
    near = noise(1, 300).clamp(0.02, 1)
    assert torch.equal(widen(quantize_rows(near, RowForm.EXACT)), near.float())
    x[4, 5], x[5, 7] = torch.nan, torch.inf
    is_lost = widen(quantize_rows(x, RowForm.EXACT)).isnan().any(1)
    assert is_lost.tolist() == [False] * 4 + [True] * 2

    x, gain, gate_up = noise(3, 100, scale=20.0), noise(100, seed=2), noise(3, 200, seed=3)
    for rows, plain in (
        (
            quantize_norm(x.clone(), None, gain, 1e-6, RowForm.EXACT),
            add_norm(x.clone(), None, gain, 1e-6),
        ),
        (quantize_silu_and_mul(gate_up, RowForm.EXACT), fused_silu_and_mul(gate_up)),
    ):
        other = quantize_rows(plain, RowForm.EXACT)
        assert torch.equal(rows.values.view(torch.uint8), other.values.view(torch.uint8))
        assert torch.equal(rows.scales, other.scales)


def test_a_row_has_the_same_bits_alone_and_in_a_batch() -> None:
    x, kinds = noise(7, 512), (*WORDS[:3], ROWS[1])
    maps = [packed.prepare_map(draw_format(64, 512, each)[0], DTYPE) for each in kinds]

    def list_results(x: Tensor) -> list[Tensor]:
        rows = quantize_rows(x, RowForm.EXACT)
        found = []
        for weight in maps:
            if isinstance(weight, WordMap):
                found.append(multiply_words(x, weight, gated=True, tile=CUT))
            elif isinstance(weight, Fp8Map):
                found.append(multiply_exact_rows(rows, weight, tile=CUT))
        return found

    together = list_results(x)
    assert len(together) == len(kinds)
    alone = list_results(x[5:6])
    assert all(torch.equal(a[0], b[5]) for a, b in zip(alone, together, strict=True))


def test_parts_fill_the_device_and_divide_the_columns() -> None:
    shapes = ((6144, 16), (4096, 16), (24_576, 16), (4096, 48))
    few = [choose_part_tile(8, *shape, 528).parts for shape in shapes]
    many = [choose_part_tile(64, *shape, 528).parts for shape in shapes]
    assert (few, many) == ([4, 8, 1, 8], [4, 4, 1, 4])
    assert choose_part_tile(1, 4096, 7, 528).parts == 7
    assert choose_part_tile(1, 4096, 11, 528).parts == 1
    assert choose_part_tile(1, 4096, 16, 528, least_tokens=16).tokens == 16


WIDE = evolve(LAYER, hidden=256, heads=4, head_dim=64, intermediate=256)


@pytest.mark.parametrize(
    ("format", "bias"),
    often(2, [(WORDS[0], False), (ROWS[0], False), (WORDS[1], True), (ROWS[1], True)]),
    ids=str,
)
def test_layers_are_those_of_the_dequantized_weights(
    format: WeightFormat, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "MOST_TOKENS", 6)

    def pack(plain: Tensor, *, bias: Tensor | None) -> Weight:
        if format is ROWS[0]:
            return pack_rows(plain, bias=bias)
        return evolve(draw_format(*plain.shape, format)[0], bias=bias)

    shape = evolve(WIDE, bias=bias)
    options = TritonOptions(packed="on" if bias else "auto", fused_linear=16)
    ops, params, plain = make_ops(shape, DTYPE, options, pack)
    config = config_of(shape)
    kinds = {type(each) for each in params.values() if each.format is not None}
    assert kinds == {WordMap if format in WORDS else Fp8Map}
    for tokens in (1, 5, 7) if format in WORDS else (5,):
        ours = cases.run_model(ops, config, params, tokens, DTYPE, "cpu")
        exact = cases.run_model(TorchOps(), config, plain, tokens, torch.float32, "cpu")
        for found, wanted in zip(ours, exact, strict=True):
            off = (found.float() - wanted).norm() / wanted.norm()
            assert off < 0.02, (tokens, float(off))


def test_layers_of_blocks_take_tokens_by_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for torch's product, which only Hopper has."""
    counts: list[int] = []

    def multiply(rows: Fp8Rows, weight: Weight, scales: Tensor) -> Tensor:
        counts.append(rows.tokens)
        x = rows.values.float() * rows.scales.repeat_interleave(128, 1)
        w = weight.tensor.float() * scales.t().repeat_interleave(128, 0).repeat_interleave(128, 1)
        product = (x @ w.t()).to(DTYPE)[: rows.tokens]
        return product if weight.bias is None else product + weight.bias

    monkeypatch.setattr(packed, "MOST_TOKENS", 6)
    monkeypatch.setattr(packed, "can_multiply_groups", lambda device: True)
    monkeypatch.setattr(packed, "multiply_groups", multiply)
    format = WeightFormat(kind=FP8, group=(128, 128))
    shape = evolve(LAYER, hidden=512, heads=4, head_dim=128, intermediate=512)
    pack = lambda plain, bias: evolve(pack_blocks(plain, format), bias=bias)  # noqa: E731
    ops, params, plain = make_ops(shape, DTYPE, TritonOptions(), pack)
    config = config_of(shape)
    for tokens in (5, 7):
        ours = cases.run_model(ops, config, params, tokens, DTYPE, "cpu")
        exact = cases.run_model(TorchOps(), config, plain, tokens, torch.float32, "cpu")
        for found, wanted in zip(ours, exact, strict=True):
            assert (found.float() - wanted).norm() < 0.06 * wanted.norm()
    assert counts == [7] * 4


def test_maps_that_no_words_hold_are_read_as_they_are_packed() -> None:
    odd = WeightFormat(kind=FP4, group=(1, 16))
    for format, dtype, width in (
        (odd, DTYPE, 256),
        (WORDS[0], torch.float16, 256),
        (WORDS[0], DTYPE, 384),
        (ROWS[0], DTYPE, 192),
        (ROWS[0], torch.float16, 256),
    ):
        weight = packed.prepare_map(draw_format(64, width, format)[0], dtype)
        assert type(weight) is Weight, (format, dtype, width)


@pytest.mark.parametrize(
    ("format", "is_taken"),
    [
        (WORDS[0], True),
        (WORDS[1], True),
        (WeightFormat(kind=FP8, group=(1, 512)), True),
        (WeightFormat(kind=FP8), True),
        (ROWS[1], False),
        (WeightFormat(kind=FP8, group=(128, 128)), True),
        (WORDS[2], False),
        (WeightFormat(kind=FP4, group=(1, 16)), False),
    ],
    ids=str,
)
def test_by_default_maps_stay_packed_that_were_measured_to_be_faster(
    format: WeightFormat, is_taken: bool
) -> None:
    spec = ParamSpec(shape=(256, 512), roles=frozenset({Role.LINEAR}))
    head = evolve(spec, roles=frozenset({Role.HEAD}))
    odd = evolve(spec, shape=(208, 512))  # torch has products of whole blocks alone
    bias = evolve(spec, shape=(256,))
    ops = configure(TritonOps(), LAYER, "bfloat16")
    assert ops.takes_format(spec, format) is is_taken
    assert ops.takes_format(odd, format) is (is_taken and format.group != (128, 128))
    assert not ops.takes_format(head, format)
    assert not ops.takes_format(bias, format)
    others = (
        configure(TritonOps(), LAYER, "float16"),
        configure(TritonOps(), LAYER, "bfloat16", evolve(HOPPER, capability=(10, 0))),
        configure(TritonOps(TritonOptions(packed="off")), LAYER, "bfloat16"),
    )
    assert not any(each.takes_format(spec, format) for each in others)
