"""Mixtures of experts against torch in float32, and the routes that their kernels follow."""

from __future__ import annotations

from typing import Any

import expert_cases as cases
import ops_cases
import pytest
import torch
from attrs import evolve
from expert_cases import CASES, WAYS, Mixture
from hypothesis import example, given, settings
from hypothesis import strategies as st
from often import count_examples, often
from ops_cases import Shape
from torch import Tensor

from headstock.nn.moe import route as torch_route
from headstock.spi import ClampedGate, Experts, Scoring, WeightFormat, WeightKind
from headstock_triton.ops import TritonOps
from headstock_triton.options import TritonOptions
from headstock_triton.pair_blocks import arrange_pairs, count_blocks
from headstock_triton.routing import route_tokens
from headstock_triton.tiles import RowTile, Tiles, choose_by_rule, choose_tiles, fit_row_tile

TYPES = (torch.bfloat16, torch.float16, torch.float32)
SIZES = [
    (1, 4, 1),
    (7, 8, 2),
    (2, 8, 8),
    (9, 8, 8),
    (2, 4, 2),
    (8, 128, 8),
    (33, 8, 2),
    (300, 8, 2),
    (300, 128, 2),
]
FEW = 40
"""Tokens up to which pairs are taken one by one here, and narrow tiles are tried: the interpreter
counts programs.
"""
SHAPE = Shape(hidden=48, heads=2, kv_heads=1, head_dim=64, intermediate=40, vocab=96)


@pytest.mark.parametrize(
    ("way", "group", "kind"),
    often(
        3,
        [
            ("tiles", (32, 32), WeightKind.FP8_E4M3),
            ("swapped", (1, 64), WeightKind.FP8_E4M3),
            (None, (16, 16), WeightKind.FP8_E4M3),
            ("tma", (32, 32), WeightKind.FP8_E4M3),
            ("wide", (128, 128), WeightKind.FP8_E4M3),
            ("swapped", (1, 32), WeightKind.INT8),
            ("tiles", (1, 64), WeightKind.INT8),
            ("rows", (64, 64), WeightKind.FP8_E4M3),
        ],
    ),
)
def test_experts_in_8_bits(way: str | None, group: tuple[int, int], kind: WeightKind) -> None:
    case = Mixture(tokens=5, count=6, chosen=2, hidden=64, inters=64)
    format = WeightFormat(kind=kind, group=group)
    tiles = None if way is None else cases.WAYS[way]
    cases.packed_case(case, format, torch.bfloat16, "cpu", tiles)


@pytest.mark.feature("V2")
@pytest.mark.parametrize(
    ("gate", "way", "tokens", "has_biases", "kind"),
    often(
        4,
        [
            ("clamped", "tiles", 9, True, None),
            ("silu", None, 5, False, None),
            ("gelu_tanh", "tma", 5, False, WeightKind.FP8_E4M3),
            ("gelu", "swapped", 7, True, None),
            ("clamped", "swapped", 3, True, WeightKind.INT8),
            ("clamped", None, 9, True, WeightKind.FP4_E2M1),
            ("silu", "wide", 300, False, None),
            ("clamped", "rows", 4, True, None),
        ],
    ),
)
def test_experts_that_were_chosen_before(
    gate: str, way: str | None, tokens: int, has_biases: bool, kind: WeightKind | None
) -> None:
    case = Mixture(tokens=tokens, count=6, chosen=3, hidden=64, inters=32)
    group = (1, 32) if kind is WeightKind.FP4_E2M1 else (1, 64)
    format = None if kind is None else WeightFormat(kind=kind, group=group)
    tiles = None if way is None else cases.WAYS[way]
    cases.chosen_case(
        case, torch.bfloat16, "cpu", tiles, gate, has_biases=has_biases, format=format
    )


@settings(max_examples=count_examples(12))
@given(
    tokens=st.integers(1, 60),
    count=st.sampled_from([1, 3, 8, 128, 200]),
    chosen=st.integers(1, 8),
    rows=st.sampled_from([16, 32]),
    seed=st.integers(0, 99),
)
@example(tokens=150, count=128, chosen=3, rows=16, seed=0)
def test_blocks_of_chosen_experts_are_those_of_routes(
    tokens: int, count: int, chosen: int, rows: int, seed: int
) -> None:
    experts = Experts(count=count, per_token=min(chosen, count), intermediate=8, renormalize=True)
    scores = torch.randn(tokens, count, generator=torch.Generator().manual_seed(seed)).bfloat16()
    slots = torch.arange(tokens)
    routes, routed = route_tokens(scores, experts, slots, 16, rows)
    assert routed is not None

    blocks = arrange_pairs(routes.ids.long(), routes.weights, count, slots, 16, rows)

    assert torch.equal(blocks.routes.ids, routes.ids)
    assert torch.equal(blocks.table[:, 1], routed.table[:, 1])
    for place, (expert, size) in enumerate(blocks.table.tolist()):
        part = slice(place * rows, place * rows + size)
        assert size == 0 or expert == routed.table[place, 0]
        assert torch.equal(blocks.order[part], routed.order[part])


@pytest.mark.parametrize("way", ["rows", "tiles", "swapped", "tma", "wide"])
@pytest.mark.parametrize(("tokens", "count", "chosen"), often(1, SIZES[1:] + SIZES[:1]))
def test_mixtures(tokens: int, count: int, chosen: int, way: str) -> None:
    if tokens > FEW and way != "wide":
        pytest.skip("as few tokens show it")
    case = Mixture(tokens=tokens, count=count, chosen=chosen)
    cases.mixture_case(case, torch.bfloat16, "cpu", WAYS[way])


@pytest.mark.parametrize("way", ["rows", "tiles", *often(0, ["swapped", "tma", "wide"])])
@pytest.mark.parametrize(
    ("tokens", "count"), often(2, [(7, 5), (40, 200), (2, 8), (33, 8), (300, 128)])
)
def test_shards_of_experts_sum_up_to_all_of_them(tokens: int, count: int, way: str) -> None:
    if tokens > FEW and way != "wide":
        pytest.skip("as few tokens show it")
    case = Mixture(tokens=tokens, count=count, chosen=3, hidden=32, inters=32)
    cases.shard_case(case, torch.bfloat16, "cpu", WAYS[way])


@pytest.mark.parametrize("dtype", often(1, TYPES))
@pytest.mark.parametrize("way", ["rows", "wide"])
def test_any_type_of_weights(way: str, dtype: torch.dtype) -> None:
    cases.mixture_case(
        Mixture(tokens=3, count=5, chosen=3, renormalize=False), dtype, "cpu", WAYS[way]
    )


@pytest.mark.parametrize("way", often(1, ["tma", "rows", "swapped", "wide"]))
@pytest.mark.parametrize(("hidden", "inters"), often(1, [(72, 24), (300, 88)]))
def test_widths_that_no_tile_divides(hidden: int, inters: int, way: str) -> None:
    case = Mixture(tokens=5, count=3, chosen=2, hidden=hidden, inters=inters)
    cases.mixture_case(case, torch.bfloat16, "cpu", evolve(WAYS[way]))


@pytest.mark.parametrize("way", often(1, ["rows", "tma", "wide"]))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_one_expert_padding_nan_and_neighbours(case: object, way: str) -> None:
    assert callable(case)
    few = Mixture(tokens=6, count=4, chosen=2, hidden=32, inters=32)
    case(few, torch.bfloat16, "cpu", WAYS[way])


@pytest.mark.parametrize("tokens", [40, *often(0, [300])])
def test_padding_among_more_tokens_than_one_program_routes(tokens: int) -> None:
    case = Mixture(tokens=tokens, count=200, chosen=1, hidden=32, inters=32)
    cases.padding_case(case, torch.bfloat16, "cpu", WAYS["wide"])


@settings(max_examples=6)
@given(
    tokens=st.integers(1, 90),
    count=st.sampled_from([1, 3, 8, 128, 200]),
    chosen=st.integers(1, 8),
    rows=st.sampled_from([16, 32]),
    padded=st.booleans(),
    seed=st.integers(0, 99),
)
# More programs than have their counts summed at once.
@example(tokens=300, count=2000, chosen=3, rows=16, padded=True, seed=0)
def test_blocks_hold_each_pair_once_in_order_with_its_expert(
    tokens: int, count: int, chosen: int, rows: int, padded: bool, seed: int
) -> None:
    experts = Experts(count=count, per_token=min(chosen, count), intermediate=8, renormalize=True)
    scores = torch.randn(tokens, count, generator=torch.Generator().manual_seed(seed)).bfloat16()
    slots = torch.arange(tokens) if padded else None  # the first 16 lie in the dummy page

    routes, blocks = route_tokens(scores, experts, slots, 16, rows)

    assert blocks is not None
    held: list[list[int]] = [[] for _ in range(count)]
    sizes = blocks.table[:, 1].tolist()
    for place, (expert, size) in enumerate(blocks.table.tolist()):
        if size:
            held[expert] += blocks.order[place * rows : place * rows + size].tolist()
    wanted = [[] for _ in range(count)]
    for pair, expert in enumerate(routes.ids.flatten().tolist()):
        if expert < count:
            wanted[expert].append(pair)
    assert held == wanted
    assert sum(size > 0 for size in sizes) == sum(-(-len(pairs) // rows) for pairs in wanted)
    if padded:
        assert bool((routes.ids[:16] == count).all() and (routes.ids[16:] < count).all())


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("renormalize", [False, True])
def test_routes_are_torchs(renormalize: bool, dtype: torch.dtype) -> None:
    experts = Experts(count=12, per_token=3, intermediate=8, renormalize=renormalize)
    _, scores = cases.draw_tokens(Mixture(tokens=70, count=12, chosen=3), dtype, "cpu")

    routes, none = route_tokens(scores, experts)

    weights, ids = torch_route(scores.float(), experts)
    assert none is None
    assert torch.equal(routes.ids.long(), ids)
    torch.testing.assert_close(routes.weights, weights)


@pytest.mark.parametrize("dtype", TYPES)
def test_of_equal_scores_the_lower_expert_is_better(dtype: torch.dtype) -> None:
    scores = torch.tensor(
        [[0.0, 1.0, -0.0, 1.0, 1.0], [-2.0, -2.0, -2.0, -3.0, -2.0], [0.0, -0.0, 0.0, -0.0, -1.0]]
    )

    routes, _ = route_tokens(
        scores.to(dtype), Experts(count=5, per_token=4, intermediate=8, renormalize=True)
    )

    assert routes.ids.tolist() == [[1, 3, 4, 0], [0, 1, 2, 4], [0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("pairs", "experts", "rows"), [(8, 128, 16), (64, 128, 16), (256, 8, 16), (65536, 128, 128)]
)
def test_so_many_blocks_are_enough_for_the_worst_routes(
    pairs: int, experts: int, rows: int
) -> None:
    used = min(pairs, experts)
    alone = used - 1  # one pair each, and all the rest to one expert
    spread = [1 + (pairs - used) // used // rows * rows] * used
    spread[0] += pairs - sum(spread)

    bound = count_blocks(pairs, experts, rows)

    assert bound >= alone + -(-(pairs - alone) // rows)
    assert bound >= sum(-(-each // rows) for each in spread)


# Rows of padding are of any numbers.
@pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:overflow encountered")
@pytest.mark.parametrize("group", often(1, [[128, 128], [1, 256]]), ids=str)
def test_tokens_of_many_pairs_are_rounded_as_experts_in_fp8(
    group: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result is that of the rounded tokens, within their error."""
    monkeypatch.setattr("headstock_triton.experts.can_multiply_rows", lambda device: True)
    monkeypatch.setattr("headstock_triton.experts.MOST_TOKENS", 8)
    case = Mixture(tokens=80, count=4, chosen=2, hidden=256, inters=128)
    format = WeightFormat(kind=WeightKind.FP8_E4M3, group=(group[0], group[1]))
    both = [
        cases.pack_experts(tensor, format, "cpu")
        for tensor in cases.draw_weights(case, torch.bfloat16, "cpu")
    ]
    packed, plain = zip(*both, strict=True)
    x, scores = cases.draw_tokens(case, torch.bfloat16, "cpu")
    exact = cases.mix_exactly(case, x, scores, *plain).double()
    off = {}
    for rounds in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr("headstock_triton.tiles._LEAST_ROUNDED_PAIRS", 8 if rounds else 1000)
            found = cases.mix_experts(x, scores, case.experts, *packed).double()
        off[rounds] = float((found - exact).norm() / exact.norm())
    assert off[False] < 0.005 < 0.01 < off[True] < 0.05, off


@pytest.mark.parametrize(
    ("more", "steps"),
    [
        ({}, (4, 8)),  # pair by pair, and in tiles
        ({"score_bias": True, "bias": True, "gate": ClampedGate(limit=0.5, slope=1.7)}, (8, 64)),
    ],
    ids=["plain", "biased, clamped"],
)
def test_layers_whose_experts_are_fused(more: dict[str, Any], steps: tuple[int, ...]) -> None:
    experts = Experts(count=5, per_token=2, intermediate=24, renormalize=True, **more)
    shape = evolve(SHAPE, layers=1, experts=experts)
    ops, config = TritonOps(), ops_cases.config_of(shape)
    assert ops.takes("moe", config, config.layers[0])
    for tokens in steps:
        ops_cases.model_case(shape, tokens, torch.bfloat16, "cpu", TritonOps())


@pytest.mark.parametrize(
    "experts",
    [
        Experts(
            count=5,
            per_token=2,
            intermediate=24,
            renormalize=True,
            scale=0.7,
            score_bias=True,
            bias=True,
            gate=ClampedGate(limit=0.5, slope=1.7),
        ),
        Experts(
            count=6,
            per_token=3,
            intermediate=16,
            renormalize=False,
            scoring=Scoring.SIGMOID,
            scale=1.7,
            shared=24,
        ),
    ],
    ids=["biased, clamped, scaled", "sigmoid, shared"],
)
def test_layers_whose_experts_are_chosen_by_torch(experts: Experts) -> None:
    shape = evolve(SHAPE, layers=1, experts=experts)
    ops = TritonOps(TritonOptions(chosen_experts=True))
    ops_cases.model_case(shape, 24, torch.bfloat16, "cpu", ops)


@pytest.mark.parametrize(
    ("dtype", "own"), [(torch.bfloat16, True), (torch.float16, True), (torch.float32, False)]
)
def test_padding_of_a_step_goes_to_no_expert_where_experts_are_fused(
    dtype: torch.dtype, own: bool
) -> None:
    shape = evolve(
        SHAPE, layers=1, experts=Experts(count=5, per_token=2, intermediate=24, renormalize=True)
    )
    config = ops_cases.config_of(shape)
    params = ops_cases.params_of(config, dtype, "cpu")
    batch = ops_cases.batch_of(config, 6, dtype, "cpu")  # its last two tokens lie in the dummy page
    layer, ops = config.layers[0], TritonOps(TritonOptions(fused_experts=True))
    ops.bind(params, config)

    def mixed() -> Tensor:
        stream = ops.moe(ops.embed(batch), layer, batch)
        assert stream.pending is not None
        return stream.pending

    assert (mixed()[4:] == 0).all().item() is own
    assert (mixed()[:4] != 0).any(1).all()


def test_no_tokens() -> None:
    gate_up, down = cases.draw_weights(Mixture(tokens=0, count=4, chosen=2), torch.bfloat16, "cpu")
    x, scores = torch.empty(0, 48, dtype=torch.bfloat16), torch.empty(0, 4, dtype=torch.bfloat16)
    found = cases.fused_mix_experts(
        x, scores, Mixture(tokens=0, count=4, chosen=2).experts, gate_up, down
    )
    assert found.shape == (0, 48)


@pytest.mark.parametrize(("tokens", "kind"), [(4, RowTile), (5, Tiles), (8192, Tiles)])
def test_few_tokens_are_taken_pair_by_pair_and_more_in_tiles(tokens: int, kind: type) -> None:
    tiles = choose_tiles(tokens, (128, 8, 2048, 768), torch.device("cpu"))
    assert isinstance(tiles, kind)


@pytest.mark.parametrize(("tokens", "kind"), [(2, RowTile), (3, Tiles), (8192, Tiles)])
def test_a_hopper_takes_pairs_one_by_one_for_two_tokens(tokens: int, kind: type) -> None:
    tiles = choose_by_rule(tokens, (128, 8, 2048, 768), hopper=True)
    assert isinstance(tiles, kind)


def test_tiles_grow_with_the_pairs_that_an_expert_has() -> None:
    # 8 experts, 2 of them for a token: a quarter of the tokens for each.
    shape = (8, 2, 4096, 14336)
    found = [choose_by_rule(tokens, shape, hopper=True) for tokens in (8, 64, 128, 256, 8192)]
    assert [tiles.rows for tiles in found if isinstance(tiles, Tiles)] == [16, 32, 64, 128, 128]


@pytest.mark.parametrize(
    ("per_token", "hidden", "inters", "wanted"),
    [
        (8, 2048, 768, RowTile(gate_up=4, down=4, warps=4)),
        (8, 4096, 1536, RowTile(gate_up=4, down=2, warps=4)),
        (2, 4096, 14_336, RowTile(gate_up=4, down=1, warps=8)),
        (8, 4096, 65_536, None),
    ],
)
def test_rows_of_pairs_fit_the_registers_of_their_threads(
    per_token: int, hidden: int, inters: int, wanted: RowTile | None
) -> None:
    assert fit_row_tile(per_token, hidden, inters) == wanted


@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize(("tokens", "kind"), [(1, RowTile), (2, Tiles)])
def test_wide_experts_are_read_once_for_two_tokens(tokens: int, kind: type, hopper: bool) -> None:
    assert isinstance(choose_by_rule(tokens, (8, 2, 4096, 14_336), hopper=hopper), kind)


@pytest.mark.parametrize("hopper", [False, True])
def test_one_token_of_experts_too_wide_for_registers_is_taken_in_tiles(hopper: bool) -> None:
    assert isinstance(choose_by_rule(1, (8, 8, 4096, 65_536), hopper=hopper), Tiles)
