"""Products of packed weights on the device, beside the numbers that these stand for."""

from __future__ import annotations

import ops_cases as cases
import pytest
import torch
from attrs import evolve
from expert_cases import WAYS, Mixture, chosen_case, packed_case
from gpu.op_times import replayed
from ops_cases import Shape
from packed_cases import make_ops
from torch import Tensor

from headstock.nn.decoder import forward
from headstock.ops.torch_ops import TorchOps
from headstock.spi import Weight, WeightFormat, WeightKind
from headstock.weights import dequantize_, quantize
from headstock_conformance.ops.packed import pack_blocks

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="needs an NVIDIA GPU from Hopper on",
)

FP8, FP4 = WeightKind.FP8_E4M3, WeightKind.FP4_E2M1
FORMATS = (
    WeightFormat(kind=FP8, group=(1, 1024)),
    WeightFormat(kind=FP8, group=(128, 128)),
    WeightFormat(kind=WeightKind.INT8, group=(1, 1024)),
    WeightFormat(kind=WeightKind.INT4, group=(1, 128), has_zeros=True),
    WeightFormat(kind=FP4, group=(1, 32)),
)
ROWS = (1, 2, 8, 17, 33, 64, 65, 300)


def draw(format: WeightFormat, outs: int, width: int, dtype: torch.dtype) -> tuple[Weight, Tensor]:
    """A prepared map with a bias, and its numbers in float32."""
    from headstock_triton.packed import prepare_map

    noise = torch.Generator("cuda").manual_seed(1)
    plain = torch.randn(outs, width, generator=noise, device="cuda") / width**0.5
    if format.group == (1, 1024):
        format = evolve(format, group=(1, width))
    stored = pack(plain.to(dtype), format)
    dequantize_(stored, plain)
    bias = torch.randn(outs, generator=noise, device="cuda").to(dtype)
    return prepare_map(evolve(stored, bias=bias), dtype), plain


def pack(plain: Tensor, format: WeightFormat) -> Weight:
    """The nearest numbers in the format."""
    is_block = format.kind is FP4 or format.group == (128, 128)
    return (pack_blocks if is_block else quantize)(plain, format)


@pytest.mark.feature("V4")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("outs", "width"), [(1024, 1024), (9216, 1024), (1152, 1280)])
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_products_are_those_of_the_dequantized_weights(
    format: WeightFormat, outs: int, width: int, dtype: torch.dtype
) -> None:
    from headstock_triton.packed import (
        is_exact,
        is_quantized,
        multiply_packed,
        multiply_packed_gated,
    )

    weight, plain = draw(format, outs, width, dtype)
    assert weight.bias is not None
    for rows in ROWS:
        x = torch.randn(rows, width, device="cuda").to(dtype)
        exact = x.float() @ plain.T + weight.bias.float()
        off = 0.05 if is_quantized(x, weight) and not is_exact(x) else 0.004
        found = multiply_packed(x, weight)
        assert (found.float() - exact).norm() < off * exact.norm(), rows
        # The kernel is one for all of these rows.
        if rows in (17, 300):
            turned = multiply_packed(x.flip(0).contiguous(), weight).flip(0)
            assert torch.equal(turned, found), rows
        if rows <= 64:
            gate, up = exact.chunk(2, 1)
            both = torch.nn.functional.silu(gate) * up
            found = multiply_packed_gated(x, weight)
            assert (found.float() - both).norm() < 0.01 * both.norm(), rows


@pytest.mark.feature("V4")
@pytest.mark.parametrize("tokens", [65, 96, 128, 129, 200, 256])
@pytest.mark.parametrize(("outs", "width"), [(4096, 4096), (4096, 12_288), (2048, 4096)])
def test_products_in_parts_are_those_of_the_rounded_tokens(
    tokens: int, outs: int, width: int
) -> None:
    from headstock_triton.fp8_rows import quantize_rows
    from headstock_triton.packed import multiply_quantized

    weight = evolve(draw(FORMATS[0], outs, width, torch.bfloat16)[0], bias=None)
    assert weight.scales is not None
    x = torch.randn(tokens, width, device="cuda").to(torch.bfloat16)
    rows = quantize_rows(x * torch.rand(tokens, 1, device="cuda").to(x.dtype))
    exact = (rows.values.float() @ weight.tensor.float().T) * rows.scales * weight.scales
    found = multiply_quantized(rows, weight, left=True)
    assert found.dim() == 3
    # Sums of the tensor cores have 14 bits.
    assert (found.sum(0) - exact).norm() < 0.003 * exact.norm()
    whole = multiply_quantized(rows, weight).float()
    assert (whole - exact).norm() < 0.005 * exact.norm()
    assert torch.equal(multiply_quantized(rows, weight, left=True), found)


@pytest.mark.feature("V4")
@pytest.mark.parametrize("format", [FORMATS[0], *FORMATS[3:]], ids=str)
@pytest.mark.parametrize(("outs", "width"), [(9216, 1024), (1152, 4096), (24576, 5120)])
def test_a_token_is_normalized_and_added_inside_its_product(
    outs: int, width: int, format: WeightFormat
) -> None:
    """The result is that of the operations one after the other, to a rounding."""
    from headstock_triton.norm import add_norm
    from headstock_triton.packed import has_fused, multiply_fused

    weight, _ = draw(format, outs, width, torch.bfloat16)
    x = torch.randn(1, width, device="cuda").bfloat16() * 3
    norm = (torch.rand(width, device="cuda") + 0.5).bfloat16()
    total = torch.randn(1, outs, device="cuda").bfloat16()
    assert has_fused(x, weight)
    normed = add_norm(x.clone(), None, norm, 1e-6)
    for gated in (False, True):
        apart = multiply_fused(normed, weight, gated=gated).float()
        found = multiply_fused(x, weight, norm=norm, eps=1e-6, gated=gated).float()
        assert (found - apart).norm() < 1e-3 * apart.norm()
    summed = total + multiply_fused(x, weight)
    assert multiply_fused(x, weight, total=total) is total
    assert torch.equal(total, summed)


SHAPE = Shape(
    hidden=2048, heads=16, kv_heads=8, head_dim=128, intermediate=6144, vocab=1000, layers=2
)
IN_LAYERS = (FORMATS[0], *FORMATS[3:], FORMATS[1], FORMATS[2])


@pytest.mark.feature("V4")
@pytest.mark.parametrize("tokens", [1, 8, 33, 100, 200])
@pytest.mark.parametrize("format", IN_LAYERS, ids=str)
def test_layers_in_a_graph_are_those_of_the_dequantized_weights(
    format: WeightFormat, tokens: int
) -> None:
    """Each replay has the bits of a call outside."""
    from headstock_triton.options import TritonOptions

    def pack_map(plain: Tensor, *, bias: Tensor | None) -> Weight:
        by_row = evolve(format, group=(1, plain.shape[1]))
        fit = by_row if format.group == (1, 1024) else format
        return evolve(pack(plain, fit), bias=bias)

    dtype, config = torch.bfloat16, cases.config_of(SHAPE)
    ops, params, plain = make_ops(SHAPE, dtype, TritonOptions(packed="on"), pack_map, "cuda")
    exact = cases.run_model(TorchOps(), config, plain, tokens, torch.float32, "cuda")
    for found, wanted in zip(
        cases.run_model(ops, config, params, tokens, dtype, "cuda"), exact, strict=True
    ):
        # More tokens are rounded to FP8, where the map is.
        off = 0.02 if tokens <= 64 or format.kind is not FP8 else 0.08
        assert (found.float() - wanted).norm() < off * wanted.norm()

    batch = cases.batch_of(config, tokens, dtype, "cuda")
    ops.bind(params, config)
    with torch.inference_mode():
        graph, found = replayed(lambda: forward(params, config, batch, lambda q, layer: q, ops))
        for change in (3, *[0] * 30, 11, *[0] * 30):
            batch.tokens.add_(change).remainder_(config.vocab)
            graph.replay()
            if change:
                expected = forward(params, config, batch, lambda q, layer: q, ops).clone()
            assert torch.equal(found, expected)


@pytest.mark.feature("V4")
@pytest.mark.parametrize("way", [None, *WAYS])
@pytest.mark.parametrize("group", [(128, 128), (1, 512)], ids=str)
@pytest.mark.parametrize("kind", [FP8, WeightKind.INT8])
def test_experts_are_those_of_the_dequantized_weights(
    kind: WeightKind, group: tuple[int, int], way: str | None
) -> None:
    format = WeightFormat(kind=kind, group=group)
    for tokens in (1, 9, 300):
        case = Mixture(tokens=tokens, count=16, chosen=4, hidden=512, inters=256)
        packed_case(case, format, torch.bfloat16, "cuda", None if way is None else WAYS[way])


@pytest.mark.feature("V4")
@pytest.mark.parametrize("sizes", [(512, 256), (2880, 160)], ids=str)
@pytest.mark.parametrize(
    "format",
    [
        WeightFormat(kind=FP4, group=(1, 32)),
        WeightFormat(kind=FP4, group=(1, 16)),
        WeightFormat(kind=WeightKind.INT4, group=(1, 128), has_zeros=True),
        WeightFormat(kind=WeightKind.INT4, group=(1, 32)),
    ],
    ids=str,
)
def test_experts_of_4_bits_are_those_of_the_dequantized_weights(
    format: WeightFormat, sizes: tuple[int, int]
) -> None:
    # Numbers of tokens for which each tile is chosen.
    for tokens in (1, 5, 20, 60, 150, 700):
        case = Mixture(tokens=tokens, count=16, chosen=4, hidden=sizes[0], inters=sizes[1])
        packed_case(case, format, torch.bfloat16, "cuda", None, by_powers=format.group == (1, 32))


@pytest.mark.feature("V4")
@pytest.mark.parametrize("tokens", [1, 9, 300])
def test_chosen_experts_of_4_bits_have_biases_and_a_gate(tokens: int) -> None:
    case = Mixture(tokens=tokens + 2, count=16, chosen=4, hidden=512, inters=256)
    format = WeightFormat(kind=FP4, group=(1, 32))
    chosen_case(case, torch.bfloat16, "cuda", None, "clamped", has_biases=True, format=format)
