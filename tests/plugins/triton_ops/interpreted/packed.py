"""Products of packed weights against the numbers that these stand for."""

from __future__ import annotations

from typing import Any

import ops_cases as cases
import pytest
import torch
from attrs import evolve
from often import often
from ops_cases import EPS
from packed_cases import BLOCKS, BY_ROW, HOPPER, LAYER, configure, draw_format, make_ops, pack_rows
from torch import Tensor

from headstock.ops.torch_ops import TorchOps
from headstock.spi import (
    Activation,
    Experts,
    ParamSpec,
    Role,
    Stream,
    Weight,
    WeightFormat,
    WeightKind,
)
from headstock.weights import dequantize_
from headstock_conformance.ops.cases import config_of
from headstock_conformance.ops.checks import list_cases
from headstock_triton import packed
from headstock_triton.activation import fused_silu_and_mul, quantize_silu_and_mul
from headstock_triton.fp8_rows import Fp8Rows, quantize_rows
from headstock_triton.linear import small_linear
from headstock_triton.norm import add_norm, quantize_norm
from headstock_triton.numbers import unpack
from headstock_triton.ops import TritonOps
from headstock_triton.options import TritonOptions
from headstock_triton.plugin import spec
from headstock_triton.split_linear import (
    SplitTile,
    choose_packed_tile,
    multiply_gated,
    multiply_in_parts,
    multiply_whole,
)

TYPES = (torch.bfloat16, torch.float16)


def draw(outs: int, width: int, dtype: torch.dtype, *, bias: bool = False) -> tuple[Weight, Tensor]:
    """A map as the kernels need it, and its numbers in float64."""
    more = {"dtype": dtype, "device": "cpu"}
    plain = cases.noise(outs, width, seed=1, scale=width**-0.5, **more)
    term = cases.noise(outs, seed=2, **more) if bias else None
    weight = pack_rows(plain * torch.linspace(0.1, 3, outs, dtype=dtype)[:, None], bias=term)
    numbers = torch.empty(outs, width)
    dequantize_(weight, numbers)
    return packed.prepare_packed(weight), numbers.double()


@pytest.mark.parametrize("dtype", often(1, TYPES))
@pytest.mark.parametrize(("outs", "width"), often(1, [(48, 160), (16, 6176)]))
def test_products_are_those_of_the_dequantized_weights(
    outs: int, width: int, dtype: torch.dtype
) -> None:
    ops = TritonOps()
    for tokens in (0, 1, 2, 33, 65):
        weight, numbers = draw(outs, width, dtype, bias=tokens != 2)
        x = cases.noise(tokens, width, dtype=dtype, device="cpu")
        expected = x.double() @ numbers.T
        expected += 0 if weight.bias is None else weight.bias

        found = ops.linear(x, weight, None)

        assert found.shape == (tokens, outs) and found.dtype == dtype
        if tokens:
            cases.within(cases.error(found, expected.to(dtype)), dtype)


@pytest.mark.parametrize(
    "parts",
    [
        {"norm": True},
        {"norm": True, "gated": True, "bias": True},
        {"total": True},
    ],
    ids=str,
)
def test_products_with_what_lies_around_them(parts: dict[str, bool]) -> None:
    ops, dtype = TorchOps(), torch.bfloat16
    for tokens, outs, width in ((1, 48, 96), (9, 32, 160)):
        gated = parts.get("gated", False)
        weight, numbers = draw(
            outs * (2 if gated else 1), width, dtype, bias=parts.get("bias", False)
        )
        x = cases.noise(tokens, width, dtype=dtype, device="cpu")
        gain = cases.noise(width, dtype=dtype, device="cpu", seed=3) if "norm" in parts else None
        total = cases.noise(tokens, outs, dtype=dtype, device="cpu") if "total" in parts else None
        value = x if gain is None else ops.rms_norm(x, Weight(tensor=gain), EPS)
        product = value.double() @ numbers.T + (0 if weight.bias is None else weight.bias)
        expected = product.to(dtype)
        if gated:
            expected = ops.activate_and_mul(expected, Activation.SILU)
        if total is not None:
            expected = total + expected

        found = small_linear(x, weight, norm=gain, eps=EPS, gated=gated, total=total)

        cases.within(cases.error(found, expected), dtype)


def test_products_in_parts_and_of_gate_and_up() -> None:
    dtype, tile = torch.bfloat16, SplitTile(tokens=16, rows=32, depth=16, parts=3, swap=True)
    weight, numbers = draw(64, 96, dtype)
    x = cases.noise(19, 96, dtype=dtype, device="cpu")
    exact = x.double() @ numbers.T

    parts = multiply_in_parts(x, weight, tile)
    cases.within(cases.error(Stream(torch.zeros(19, 64), parts).settle(), exact.float()), dtype)

    biased, _ = draw(64, 96, dtype, bias=True)
    assert biased.bias is not None
    for each in (evolve(tile, parts=1), evolve(tile, parts=1, swap=False)):
        found = multiply_gated(x, biased, each)
        both = (exact + biased.bias.double()).to(dtype)
        cases.within(cases.error(found, TorchOps().activate_and_mul(both, Activation.SILU)), dtype)


FORMATS = (
    (WeightFormat(kind=WeightKind.INT4, group=(1, 32), has_zeros=True), torch.float16),
    (WeightFormat(kind=WeightKind.FP8_E4M3, group=(32, 32)), torch.bfloat16),
    (WeightFormat(kind=WeightKind.FP4_E2M1, group=(1, 32)), torch.bfloat16),
    (WeightFormat(kind=WeightKind.INT8, group=(1, 64)), torch.bfloat16),
    (WeightFormat(kind=WeightKind.INT4), torch.bfloat16),
    (WeightFormat(kind=WeightKind.INT4, group=(1, 64), has_zeros=True), torch.bfloat16),
    (WeightFormat(kind=WeightKind.FP8_E4M3, group=(16, 64)), torch.float16),
    (WeightFormat(kind=WeightKind.FP8_E4M3, group=(128, 128)), torch.bfloat16),
    (WeightFormat(kind=WeightKind.FP4_E2M1, group=(1, 16)), torch.float16),
    (WeightFormat(kind=WeightKind.INT8), torch.float16),
    (WeightFormat(kind=WeightKind.INT8, group=(1, 32), has_zeros=True), torch.bfloat16),
)


@pytest.mark.parametrize(("format", "dtype"), often(3, FORMATS), ids=str)
def test_every_format_is_multiplied_by_as_it_is_packed(
    format: WeightFormat, dtype: torch.dtype
) -> None:
    outs, width, ops = 64, 64, TritonOps()
    bias = cases.noise(outs, dtype=dtype, device="cpu", seed=5)
    stored, numbers = draw_format(outs, width, format)
    weight = packed.prepare_packed(stored)
    torch.testing.assert_close(
        unpack(weight, torch.float32).double(), numbers, rtol=1e-6, atol=1e-6
    )
    for tokens, more in ((1, {}), (3, {"bias": bias}), (65, {"bias": bias})):
        x = cases.noise(tokens, width, dtype=dtype, device="cpu")
        exact = x.double() @ numbers.T + (bias.double() if more else 0)

        found = ops.linear(x, evolve(weight, **more), None)

        cases.within(cases.error(found, exact.to(dtype)), dtype)
    x = cases.noise(5, width, dtype=dtype, device="cpu")
    product = (x.double() @ numbers.T + bias.double()).to(dtype)
    gated = packed.multiply_packed_gated(x, evolve(weight, bias=bias))
    activated = TorchOps().activate_and_mul(product, Activation.SILU)
    cases.within(cases.error(gated, activated), dtype)
    tile = SplitTile(tokens=16, rows=64, depth=16, parts=2, swap=True)
    parts = multiply_in_parts(x, weight, tile)
    cases.within(cases.error(parts.sum(0), (x.double() @ numbers.T).float()), dtype)


def test_a_row_has_the_same_bits_alone_and_in_a_batch() -> None:
    weight, _ = draw(48, 96, torch.bfloat16)
    x = cases.noise(7, 96, dtype=torch.bfloat16, device="cpu")
    tile = choose_packed_tile(7, 96, 48, 96)
    gain = cases.noise(96, dtype=torch.bfloat16, device="cpu", seed=3)
    gate_up = cases.noise(7, 192, dtype=torch.bfloat16, device="cpu", seed=4)

    def list_results(place: slice) -> list[Tensor]:
        rows = (
            quantize_rows(x[place]),
            quantize_norm(x[place].clone(), None, gain, EPS),
            quantize_silu_and_mul(gate_up[place]),
        )
        quantized = [each for row in rows for each in (row.values.view(torch.uint8), row.scales)]
        return [multiply_whole(x[place], weight, tile), *quantized]

    together = list_results(slice(None))
    for row in range(7):
        alone = list_results(slice(row, row + 1))
        assert all(torch.equal(a[0], b[row]) for a, b in zip(alone, together, strict=True))


def test_norms_and_activations_are_quantized_as_rows_of_their_results_are() -> None:
    more = {"dtype": torch.bfloat16, "device": "cpu"}
    x, term = cases.noise(3, 100, scale=20.0, **more), cases.noise(3, 100, seed=1, **more)
    gain, gate_up = cases.noise(100, seed=2, **more), cases.noise(3, 200, seed=3, **more)
    x[0] = 0

    def assert_same(rows: Fp8Rows, plain: Tensor) -> None:
        other = quantize_rows(plain)
        assert torch.equal(rows.values.view(torch.uint8), other.values.view(torch.uint8))
        assert torch.equal(rows.scales, other.scales)
        restored = rows.values.float() * rows.scales
        largest = plain.float().abs().amax(1, keepdim=True)
        assert bool(((restored - plain.float()).abs() <= largest / 16 + 1e-30).all())

    assert_same(quantize_norm(x.clone(), None, gain, EPS), add_norm(x.clone(), None, gain, EPS))
    ours, theirs = x.clone(), x.clone()
    assert_same(quantize_norm(ours, term, gain, EPS), add_norm(theirs, term, gain, EPS))
    assert torch.equal(ours, theirs)
    assert_same(quantize_silu_and_mul(gate_up), fused_silu_and_mul(gate_up))


@pytest.mark.filterwarnings("ignore:invalid value encountered in divide")
def test_nan_and_infinities_stay_in_their_row() -> None:
    x = cases.noise(3, 48, dtype=torch.bfloat16, device="cpu")
    x[1, 5], x[2, 7] = torch.nan, torch.inf

    rows = quantize_rows(x)

    restored = rows.values.float() * rows.scales
    assert restored.isnan().any(1).tolist() == [False, True, True]
    weight, _ = draw(16, 48, torch.bfloat16)
    assert unpack(weight, torch.bfloat16).isfinite().all()


PACKED = TritonOptions(packed="on")


@pytest.mark.parametrize("scaled", [False, True])
def test_layers_are_those_of_the_dequantized_weights(
    scaled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of few tokens, and of many with and without torch's products of rows in FP8."""
    monkeypatch.setattr(packed, "can_multiply_rows", lambda device: scaled)
    monkeypatch.setattr(packed, "MOST_TOKENS", 6)
    calls: list[int] = []
    multiply: Any = torch._scaled_mm
    monkeypatch.setattr(
        torch,
        "_scaled_mm",
        lambda x, *rest, **more: (calls.append(len(x)), multiply(x, *rest, **more))[1],
    )
    dtype = torch.bfloat16
    ops, params, plain = make_ops(
        LAYER, dtype, TritonOptions(packed="on", fused_linear=0 if scaled else 16)
    )
    config = config_of(LAYER)
    for tokens in (7,) if scaled else (1, 5, 7):
        ours = cases.run_model(ops, config, params, tokens, dtype, "cpu")
        exact = cases.run_model(TorchOps(), config, plain, tokens, torch.float32, "cpu")
        for found, wanted in zip(ours, exact, strict=True):
            off = (found.float() - wanted).norm() / wanted.norm()
            assert off < (0.06 if scaled else 0.02), (tokens, float(off))
    # Two products of attention and two of the feed-forward part.
    assert calls == ([7] * 4 if scaled else [])


def test_experts_stay_packed_in_layers_whose_kernels_take_them() -> None:
    experts = Experts(count=4, per_token=2, intermediate=48, renormalize=True)
    shape, dtype = evolve(LAYER, experts=experts), torch.bfloat16
    ops, params, plain = make_ops(shape, dtype, PACKED)
    config = config_of(shape)
    ours = cases.run_model(ops, config, params, 3, dtype, "cpu")
    exact = cases.run_model(TorchOps(), config, plain, 3, torch.float32, "cpu")
    for found, wanted in zip(ours, exact, strict=True):
        assert (found.float() - wanted).norm() < 0.02 * wanted.norm()

    spec = ParamSpec(shape=(4, 96, 64), roles=frozenset({Role.EXPERTS}))
    assert ops.takes_format(spec, BLOCKS)
    assert ops.takes_format(spec, evolve(BLOCKS, kind=WeightKind.INT4, group=(1, 32)))
    assert not ops.takes_format(spec, evolve(BLOCKS, kind=WeightKind.INT4))
    scaled = evolve(shape, experts=evolve(experts, scale=2.0))  # torch chooses its experts
    assert configure(TritonOps(PACKED), scaled, "bfloat16").takes_format(spec, BLOCKS)
    by_torch = TritonOps(evolve(PACKED, chosen_experts=False))
    assert not configure(by_torch, scaled, "bfloat16").takes_format(spec, BLOCKS)
    by_torch = TritonOps(evolve(PACKED, fused_experts=False))
    assert not configure(by_torch, shape, "bfloat16").takes_format(spec, BLOCKS)
    # By default those of FP8 and 4 bits.
    default, mxfp4 = TritonOps(), evolve(BLOCKS, kind=WeightKind.FP4_E2M1, group=(1, 32))
    assert configure(default, scaled, "bfloat16").takes_format(spec, mxfp4)
    assert default.takes_format(spec, BLOCKS)
    assert not default.takes_format(spec, evolve(BLOCKS, kind=WeightKind.INT8))


@pytest.mark.full
def test_the_kit_finds_maps_of_every_claimed_format_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstock_conformance.ops.packed.TOKENS", (1, 3))
    opt = ("triton.packed=on",)
    cases = list_cases(spec(), evolve(HOPPER, device="cpu"), opt=opt)
    chosen = [case for case in cases if case.name.startswith("maps in ")]

    assert len(chosen) == len(spec().capabilities.formats)
    for case in chosen:
        case.run()


@pytest.mark.parametrize(
    ("parameter", "format", "env", "dtype", "taken"),
    [
        ({}, {}, {}, "bfloat16", True),
        ({}, {"group": (1, 64)}, {}, "float16", True),
        ({"roles": frozenset({Role.HEAD})}, {}, {}, "bfloat16", True),
        ({"roles": frozenset({Role.HEAD, Role.EMBEDDING})}, {}, {}, "bfloat16", False),
        ({"roles": frozenset({Role.EXPERTS}), "shape": (4, 32, 64)}, {}, {}, "bfloat16", False),
        ({"shape": (40, 64)}, {}, {}, "bfloat16", False),
        ({"shape": (32, 72)}, {}, {}, "bfloat16", False),
        ({}, {"group": (16, 16)}, {}, "bfloat16", True),
        ({}, {"group": (16, 24)}, {}, "bfloat16", False),
        ({}, {"group": (16, 16), "kind": WeightKind.INT8}, {}, "bfloat16", False),
        ({}, {"has_zeros": True, "group": (1, 64)}, {}, "bfloat16", False),
        ({}, {"kind": WeightKind.INT8}, {}, "bfloat16", True),
        ({}, {"kind": WeightKind.INT8, "has_zeros": True}, {}, "bfloat16", False),
        ({}, {"kind": WeightKind.INT4, "group": (1, 32), "has_zeros": True}, {}, "float16", True),
        ({}, {"kind": WeightKind.FP4_E2M1, "group": (1, 16)}, {}, "float16", True),
        ({}, {"kind": WeightKind.FP4_E2M1, "group": (1, 8)}, {}, "float16", False),
        ({}, {}, {"capability": (8, 6)}, "bfloat16", False),
        ({}, {}, {}, "float32", False),
    ],
)
def test_maps_by_row_are_taken_where_the_device_converts_them(
    parameter: dict[str, Any], format: dict[str, Any], env: dict[str, Any], dtype: str, taken: bool
) -> None:
    ops = configure(TritonOps(PACKED), LAYER, dtype, evolve(HOPPER, **env))
    linear = evolve(ParamSpec(shape=(32, 64), roles=frozenset({Role.LINEAR})), **parameter)
    packing = evolve(BY_ROW, **format)

    assert ops.takes_format(linear, packing) is taken
    by_default = configure(TritonOps(), LAYER, dtype, evolve(HOPPER, **env))
    assert not by_default.takes_format(linear, packing)
