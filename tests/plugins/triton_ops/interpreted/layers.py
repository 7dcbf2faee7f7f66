"""Norms, heads, activation and whole layers against the torch operations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import ops_cases as cases
import pytest
import torch
from attrs import evolve
from often import often
from ops_cases import Shape

from headstock.ops.torch_ops import TorchOps
from headstock.spi import Collectives, Experts, Stream, Weight
from headstock_conformance.ops.models import make_unequal_config
from headstock_triton.few_linear import (
    choose_few_gated_tile,
    choose_few_tile,
    count_tiles,
    is_few,
    multiply_few,
)
from headstock_triton.gated_linear import LEAST_TOKENS, GatedTile, choose_large_tile
from headstock_triton.heads import rope_and_store_kv
from headstock_triton.linear import MOST_FUSED_WIDTH, MOST_PART_WIDTH
from headstock_triton.ops import TritonOps
from headstock_triton.options import TritonOptions
from headstock_triton.split_linear import SplitTile
from headstock_triton.split_sums import PartTile

TYPES = (torch.bfloat16, torch.float16, torch.float32)
SMALL = Shape(hidden=48, heads=4, kv_heads=2, head_dim=64, intermediate=40, vocab=96)
MODEL = evolve(SMALL, heads=2, kv_heads=1, head_dim=32)
"""Whole layers take their time for each program that the interpreter runs."""


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("hidden", [16, 48, 1000])
def test_norms(hidden: int, dtype: torch.dtype) -> None:
    for tokens in (0, 1, 5):
        if tokens:
            cases.norm_case(tokens, hidden, dtype, "cpu", pending=False)
            cases.norm_case(tokens, hidden, dtype, "cpu", pending=True)
            cases.embed_case(tokens, hidden, dtype, "cpu")
    nothing = torch.empty(0, hidden, dtype=dtype)
    assert cases.norm.add_norm(nothing, nothing, nothing.new_ones(hidden), 1e-6).shape == (
        0,
        hidden,
    )


def test_a_norm_of_nan_is_nan_and_stays_in_its_row() -> None:
    x = cases.noise(3, 48, dtype=torch.bfloat16, device="cpu")
    x[1, 5] = torch.nan

    found = cases.norm.add_norm(x, None, torch.ones(48, dtype=torch.bfloat16), 1e-6)

    assert found.isnan().any(1).tolist() == [False, True, False]
    assert found[1].isnan().all()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [40, 1030])
def test_activation(width: int, dtype: torch.dtype) -> None:
    cases.activation_case(3, width, dtype, "cpu")


@pytest.mark.parametrize("dtype", often(1, [torch.bfloat16, torch.float16]))
@pytest.mark.parametrize(("outs", "width"), [(40, 64), (24, 100), (18, 1100)])
def test_products_of_a_few_tokens(outs: int, width: int, dtype: torch.dtype) -> None:
    for tokens in (1, 2, 3, 4, 5, 16):
        cases.linear_case(tokens, outs, width, dtype, "cpu", bias=tokens % 2 == 0)


PARTS: tuple[dict[str, bool], ...] = (
    {"normed": True},
    {"normed": True, "gated": True, "bias": True},
    {"added": True},
    {"added": True, "bias": True},
)


@pytest.mark.parametrize("dtype", often(1, [torch.bfloat16, torch.float16]))
@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_products_with_what_lies_around_them(parts: dict[str, bool], dtype: torch.dtype) -> None:
    for tokens, outs, width in ((1, 21, 100), (3, 40, 48), (9, 18, 1100)):
        cases.fused_linear_case(tokens, outs, width, dtype, "cpu", **parts)


def test_layers_have_sizes_of_their_own() -> None:
    config, ops = make_unequal_config(), TritonOps()
    taken = [
        ops.takes(operation, config, layer)
        for operation in ("qkv_rope_store", "attn_out", "mlp")
        for layer in config.layers
    ]
    assert all(taken)

    params = cases.params_of(config, torch.float32, "cpu")
    ours, theirs = (
        cases.run_model(each, config, params, 5, torch.float32, "cpu") for each in (ops, TorchOps())
    )
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, atol=1e-4, rtol=1e-4)


SPLIT_TILES = (
    SplitTile(tokens=16, rows=32, depth=16, parts=3, swap=True),
    SplitTile(tokens=32, rows=16, depth=32, parts=2),
    SplitTile(tokens=16, rows=16, depth=16),
)


@pytest.mark.parametrize("dtype", often(1, [torch.bfloat16, torch.float16]))
@pytest.mark.parametrize("tile", often(1, SPLIT_TILES), ids=str)
def test_products_in_parts_reach_the_next_norm(tile: SplitTile, dtype: torch.dtype) -> None:
    for tokens, outs in ((1, 16), (37, 40)):
        cases.split_case(tokens, outs, 192, dtype, "cpu", tile)


@pytest.mark.parametrize("dtype", often(1, [torch.bfloat16, torch.float16]))
@pytest.mark.parametrize(
    "tile",
    [
        evolve(SPLIT_TILES[0], parts=1),
        SPLIT_TILES[2],
        GatedTile(tokens=16, rows=16, depth=16),
        GatedTile(tokens=32, rows=16, depth=32, group=2),
    ],
    ids=str,
)
def test_products_of_gate_and_up_with_the_activation(
    tile: SplitTile | GatedTile, dtype: torch.dtype
) -> None:
    for tokens, outs in ((1, 16), (37, 40), (70, 32)):
        cases.gated_case(tokens, outs, 96, dtype, "cpu", tile)


def test_steps_of_tens_of_tokens_have_products_in_parts() -> None:
    shape = Shape(
        hidden=64, heads=2, kv_heads=1, head_dim=128, intermediate=256, vocab=16, layers=1
    )
    ops = TritonOps()
    cases.model_case(shape, 20, torch.bfloat16, "cpu", ops)
    term = cases.noise(20, 256, dtype=torch.bfloat16, device="cpu")
    weight = Weight(tensor=cases.noise(64, 256, dtype=torch.bfloat16, device="cpu", scale=1 / 16))
    for options, shape_of_term in (({}, (2, 20, 64)), ({"split_linear": 19}, (20, 64))):
        stream = Stream(torch.zeros(20, 64, dtype=torch.bfloat16))
        found = TritonOps(TritonOptions(**options)).add_product(stream, term, weight, None)
        assert found.pending is not None and found.pending.shape == shape_of_term
        expected = TorchOps().linear(term, weight, None)
        assert cases.error(found.settle(), expected) < cases.LIMITS[torch.bfloat16]


def test_gate_and_up_of_many_tokens_have_a_tile_at_every_width() -> None:
    def group(tokens: int, width: int, inters: int) -> int | None:
        tile = choose_large_tile(tokens, width, inters, processors=132)
        return None if tile is None else tile.group

    assert [group(LEAST_TOKENS, width, 3072) for width in (1024, 2048, 5120)] == [8, 16, 16]
    assert group(2048, 1000, 3072) is None and group(2048, 1024, 3000) is None
    # Fewer tokens where whole tiles fill 132 processors: 384 in three rounds, 256 in two.
    assert group(512, 4096, 12_288) == group(512, 2048, 8192) == 16
    # 448 in four rounds, and 400 tokens of 512.
    assert group(512, 4096, 14_336) is group(400, 4096, 12_288) is None
    assert group(128, 2048, 16_384) is None


def test_sums_of_many_tokens_are_made_by_their_product() -> None:
    term = cases.noise(LEAST_TOKENS, 16, dtype=torch.bfloat16, device="cpu")
    weight = Weight(tensor=cases.noise(8, 16, dtype=torch.bfloat16, device="cpu", scale=0.25))
    total = cases.noise(LEAST_TOKENS, 8, dtype=torch.bfloat16, device="cpu", seed=1)
    expected = (total.float() + term.float() @ weight.tensor.float().T).bfloat16()
    for options in ({}, {"large_linear": False}):
        stream = Stream(total.clone())
        found = TritonOps(TritonOptions(**options)).add_product(stream, term, weight, None)
        assert (found.pending is None) == (not options)
        assert cases.error(found.settle(), expected) < cases.LIMITS[torch.bfloat16]


@pytest.mark.parametrize("dtype", TYPES[:2])
def test_products_of_few_tokens_whose_depth_programs_share(dtype: torch.dtype) -> None:
    for tokens, outs, width, parts in ((2, 96, 512, 4), (9, 130, 256, 1), (16, 64, 384, 3)):
        seats = 8 if tokens <= 8 else 16
        tile = PartTile(rows=64, tokens=seats, parts=parts, warps=4, stages=3)
        cases.few_case(tokens, outs, width, dtype, "cpu", tile, bias=parts == 3)
        cases.gated_case(tokens, outs, width, dtype, "cpu", choose_few_gated_tile(tokens))


def test_few_tokens_and_wide_maps_are_multiplied_in_shared_parts() -> None:
    def is_own(tokens: int, outs: int, width: int, dtype: torch.dtype = torch.bfloat16) -> bool:
        return is_few(torch.empty(tokens, width, dtype=dtype), outs)

    assert is_own(2, 4096, 4096) and is_own(16, 34_816, 5120)
    assert not is_own(1, 4096, 4096) and not is_own(17, 4096, 4096)
    assert not is_own(8, 2048, 4096) and not is_own(8, 151_936, 4096)
    assert not is_own(8, 4096, 1024) and not is_own(8, 4096, 4096 + 64)
    assert not is_own(8, 4096, 4096, torch.float32)
    for outs, width in ((4096, 4096), (3072, 4096), (4096, 6144), (24_576, 4096), (5120, 17_408)):
        tile = choose_few_tile(8, width, outs)
        assert width % (tile.parts * 128) == 0 and tile.parts * count_tiles(outs) <= 384


def test_a_bound_layer_multiplies_few_tokens_in_shared_parts() -> None:
    width, hidden = 2048, 2112
    weight = Weight(
        tensor=cases.noise(hidden, width, dtype=torch.bfloat16, device="cpu", scale=width**-0.5)
    )
    x = cases.noise(3, width, dtype=torch.bfloat16, device="cpu", seed=1)
    by_torch = TorchOps().linear(x, weight, None)

    for option, ranks, is_own in (
        ("on", 1, True), ("auto", 1, False), ("auto", 2, True), ("off", 2, False)
    ):  # fmt: skip
        ops = TritonOps(TritonOptions(few_linear=option, push_bytes=0))  # type: ignore[arg-type]
        collectives = Collectives()
        collectives.count = ranks
        ops.bind({"any": weight}, cast("Any", SimpleNamespace(norm_eps=1e-6)), collectives)
        found = ops.linear(x, weight, None)
        wanted = multiply_few(x, weight, ops.counters) if is_own else by_torch
        assert torch.equal(found, wanted) and not ops.counters.any()
        cases.within(cases.error(found, by_torch), torch.bfloat16)


def test_a_step_is_fused_where_options_tokens_types_and_widths_allow_it() -> None:
    def is_fused(tokens: int, hidden: int, dtype: torch.dtype, **options: int) -> bool:
        stream = Stream(torch.zeros(tokens, hidden, dtype=dtype))
        return TritonOps(TritonOptions(**options)).is_fused(stream)

    half = torch.bfloat16
    assert is_fused(1, 8192, half) and is_fused(16, MOST_FUSED_WIDTH, half)
    assert not is_fused(2, MOST_FUSED_WIDTH + 8, half)
    assert not is_fused(17, 64, half) and not is_fused(0, 64, half)
    assert not is_fused(1, 64, torch.float32)
    assert not is_fused(1, 64, half, fused_linear=0) and not is_fused(3, 64, half, fused_linear=2)


class Twice(Collectives):
    """Two ranks that bring the same numbers."""

    count = 2

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x + x


@pytest.mark.parametrize("tokens", [1, 20, LEAST_TOKENS])
def test_a_rank_leaves_its_part_of_a_term_pending(tokens: int) -> None:
    width, hidden = 512, 16
    term = cases.noise(tokens, width, dtype=torch.bfloat16, device="cpu")
    weight = Weight(
        tensor=cases.noise(
            hidden, width, dtype=torch.bfloat16, device="cpu", scale=width**-0.5, seed=1
        )
    )
    total = cases.noise(tokens, hidden, dtype=torch.bfloat16, device="cpu", seed=2)
    gain = Weight(tensor=cases.noise(hidden, dtype=torch.bfloat16, device="cpu", seed=3))
    ops, ranks, config = TritonOps(), Twice(), cast("Any", SimpleNamespace(norm_eps=1e-6))
    ops.bind({}, config, ranks)

    found = ops.add_product(Stream(total.clone()), term, weight, cast("Any", None))

    assert found.pending is not None and torch.equal(found.total, total)
    expected = total + 2 * TorchOps().linear(term, weight, None)
    cases.within(cases.error(found.copy_total(), expected), torch.bfloat16)
    if tokens == LEAST_TOKENS:
        return  # one more interpreted program for each would show nothing new
    normed = ops.normalize(found, gain)
    assert found.pending is None and found.sum_over.count == 1
    cases.within(cases.error(found.total, expected), torch.bfloat16)
    cases.within(cases.error(normed, TorchOps().rms_norm(expected, gain, 1e-6)), torch.bfloat16)


def test_a_product_that_cannot_be_added_inside_stays_pending_and_reaches_the_next_norm() -> None:
    width = MOST_PART_WIDTH + 8
    term = cases.noise(2, width, dtype=torch.bfloat16, device="cpu")
    weight = Weight(
        tensor=cases.noise(8, width, dtype=torch.bfloat16, device="cpu", scale=width**-0.5)
    )
    total = cases.noise(2, 8, dtype=torch.bfloat16, device="cpu", seed=1)
    stream = Stream(total.clone())

    found = TritonOps().add_product(stream, term, weight, None)

    assert found.pending is not None and torch.equal(found.total, total)
    assert torch.equal(found.settle(), total + TorchOps().linear(term, weight, None))


def test_a_norm_of_nan_inside_a_product_stays_in_its_row() -> None:
    x = cases.noise(3, 48, dtype=torch.bfloat16, device="cpu")
    x[1, 5] = torch.nan
    weight = cases.noise(20, 48, dtype=torch.bfloat16, device="cpu")
    gain = torch.ones(48, dtype=torch.bfloat16)

    found = cases.linear.small_linear(x, Weight(tensor=weight), norm=gain, eps=1e-6)

    assert found.isnan().all(1).tolist() == found.isnan().any(1).tolist() == [False, True, False]


@pytest.mark.parametrize(
    "shape",
    often(1, [MODEL, evolve(MODEL, qk_norm=False, bias=True), evolve(MODEL, rope_dim=16)]),
    ids=str,
)
def test_whole_layers_whose_products_take_in_what_lies_around_them(shape: Shape) -> None:
    for tokens in (1, 4):
        ops = TritonOps(TritonOptions(fused_linear=4))
        cases.model_case(shape, tokens, torch.bfloat16, "cpu", ops)


def test_products_are_torchs_unless_the_option_says_otherwise() -> None:
    weight = Weight(tensor=cases.noise(24, 64, dtype=torch.bfloat16, device="cpu"))
    for tokens, own in ((2, True), (3, False)):
        x = cases.noise(tokens, 64, dtype=torch.bfloat16, device="cpu")
        found = TritonOps(TritonOptions(small_linear=2)).linear(x, weight, None)
        made_by_torch = TritonOps().linear(x, weight, None)
        assert torch.equal(made_by_torch, TorchOps().linear(x, weight, None))
        expected = cases.linear.small_linear(x, weight) if own else made_by_torch
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", often(1, TYPES))
@pytest.mark.parametrize("head_dim", often(1, [80, 128, 64, 96, 256]))
def test_heads(head_dim: int, dtype: torch.dtype) -> None:
    shape = evolve(SMALL, head_dim=head_dim)
    for each in (shape, evolve(shape, qk_norm=False), evolve(shape, rope_dim=head_dim // 4)):
        cases.heads_case(each, 4, dtype, "cpu", page_size=4)


@pytest.mark.parametrize(
    ("heads", "kv_heads"), often(1, [(14, 2), (1, 1), (7, 1), (3, 3), (16, 8), (40, 8)])
)
def test_any_number_of_heads(heads: int, kv_heads: int) -> None:
    cases.heads_case(evolve(SMALL, heads=heads, kv_heads=kv_heads), 3, torch.bfloat16, "cpu")


@pytest.mark.parametrize("page_size", often(1, [3, 16, 1, 64]))
def test_any_page_size(page_size: int) -> None:
    for tokens in (1, 5):
        cases.heads_case(SMALL, tokens, torch.bfloat16, "cpu", page_size=page_size)


@pytest.mark.full
def test_many_tokens_are_shared_out_otherwise() -> None:
    cases.heads_case(SMALL, 65, torch.bfloat16, "cpu", page_size=16)


@pytest.mark.parametrize("dtype", often(1, TYPES))
def test_eight_bit_pools(dtype: torch.dtype) -> None:
    cases.heads_case(evolve(SMALL, rope_dim=16), 4, dtype, "cpu", pool_dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize("rope_dim", often(1, [16, None]))
def test_keys_and_values_are_divided_by_their_scales(rope_dim: int | None) -> None:
    shape = evolve(SMALL, rope_dim=rope_dim)
    for pool_dtype in (torch.float8_e4m3fn, torch.bfloat16):
        cases.heads_case(shape, 5, torch.bfloat16, "cpu", pool_dtype=pool_dtype, scales=(0.3, 7.0))


def test_eight_bit_pools_saturate() -> None:
    qkv = torch.tensor([[0.0] * 16 + [1e4, -1e4] + [0.0] * 14 + [500.0, torch.nan] + [1.0] * 14])
    pool = torch.zeros(2, 2, 4, 1, 16).to(torch.float8_e4m3fn)
    table, at, slots = (
        torch.stack((torch.ones(1, 8), torch.zeros(1, 8)), 1),
        torch.tensor([0]),
        torch.tensor([5]),
    )

    rope_and_store_kv(qkv, None, table, at, slots, pool, heads=1, eps=1e-6)

    key, value = pool.float()[1, :, 1, 0]
    assert key[:2].tolist() == [448.0, -448.0]
    assert value[0] == 448.0 and value[1].isnan() and value[2] == 1.0


@pytest.mark.parametrize("dtype", often(1, [torch.bfloat16, torch.float32]))
@pytest.mark.parametrize(
    "shape",
    often(
        1, [MODEL, evolve(MODEL, qk_norm=False, bias=True, rope_dim=16), evolve(MODEL, bias=True)]
    ),
    ids=str,
)
def test_whole_layers(shape: Shape, dtype: torch.dtype) -> None:
    cases.model_case(shape, 4, dtype, "cpu")


@pytest.mark.full
def test_layers_of_experts() -> None:
    experts = Experts(count=5, per_token=2, intermediate=24, renormalize=True)
    cases.model_case(evolve(MODEL, head_dim=64, experts=experts), 4, torch.float32, "cpu")


def test_a_step_without_tokens() -> None:
    config = cases.config_of(SMALL)
    params = cases.params_of(config, torch.float32, "cpu")

    hidden, *_ = cases.run_model(cases.TritonOps(), config, params, 0, torch.float32, "cpu")

    assert hidden.shape == (0, SMALL.hidden)


@pytest.mark.full
def test_layers_of_experts_between_products_that_take_in_the_norm() -> None:
    experts = Experts(count=5, per_token=2, intermediate=24, renormalize=True)
    ops = TritonOps(TritonOptions(fused_linear=4))
    cases.model_case(evolve(MODEL, head_dim=64, experts=experts), 4, torch.bfloat16, "cpu", ops)
