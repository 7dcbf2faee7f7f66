"""How the tiles of experts are measured: by timers that know the tiles, and with the kernels."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

import ops_cases
import pytest
import torch
from attrs import asdict, evolve
from often import often
from ops_cases import Shape
from torch import Tensor

from headstock import UsageError
from headstock.registry import make_options
from headstock.spi import DeviceEnv, Experts, ModelConfig, PartQuery
from headstock_triton import experts as mixtures
from headstock_triton.ops import TritonOps
from headstock_triton.options import TritonOptions
from headstock_triton.plugin import spec
from headstock_triton.tiles import RowTile, Tile, Tiles, choose_tiles, read_tables
from headstock_triton.tune_experts import Timer, Works, make_layer, tune_experts, tune_layer

EXPERTS = Experts(count=5, per_token=2, intermediate=24, renormalize=True)
SHAPE = Shape(hidden=48, heads=2, kv_heads=1, head_dim=32, intermediate=40, vocab=96, layers=2)
KEY = (5, 2, 48, 24)
CPU = torch.device("cpu")
SMALLEST = Tiles(
    rows=16,
    gate_up=Tile(n=32, k=128, stages=3, tma=True),
    down=Tile(n=64, k=128, stages=3, tma=True),
)


def config_of() -> ModelConfig:
    """A model of two layers with these experts."""
    return ops_cases.config_of(evolve(SHAPE, experts=EXPERTS))


def timer(cost: Callable[[RowTile | Tiles], float]) -> Timer:
    """A timer by which a product is as slow as its tile is wide, and a whole costs `cost`."""

    def time_us(works: Works) -> float:
        known = inspect.getclosurevars(works[0]).nonlocals
        if "tiles" in known:
            return cost(known["tiles"])
        tile: Tile = known["tile"]
        return tile.n + tile.k / 1000 - tile.tma / 10

    return time_us


def rows_or(cost: float) -> Timer:
    """A timer by which tiles cost so much, and pairs one by one 100."""
    return timer(lambda tiles: cost if isinstance(tiles, Tiles) else 100.0)


def tune(time_us: Timer, *tokens: int) -> dict[int, RowTile | Tiles]:
    """The fastest tiles for so many tokens by that timer."""
    layer = make_layer(EXPERTS, SHAPE.hidden, torch.bfloat16, CPU, time_us)
    return tune_layer(layer, tokens)


def test_the_fastest_of_each_product_make_the_fastest_whole() -> None:
    assert tune(rows_or(50.0), 2) == {2: SMALLEST}


@pytest.mark.parametrize(("cost", "found"), [(96.0, {2: SMALLEST}), (98.0, {}), (120.0, {})])
def test_what_is_chosen_without_measuring_stays_unless_others_are_faster_by_the_margin(
    cost: float, found: dict[int, Tiles]
) -> None:
    assert tune(rows_or(cost), 2) == found


def test_neighbours_with_the_same_tiles_are_one_entry() -> None:
    rows = choose_tiles(1, KEY, CPU)
    time_us = timer(lambda tiles: {rows: 10.0, SMALLEST: 5.0}.get(tiles, 20.0))

    assert tune(time_us, 1, 2, 4) == {4: SMALLEST}


def test_blocks_grow_with_the_pairs_of_an_expert() -> None:
    # 2,048 tokens: 819 pairs for each of 5 experts, so that small blocks are not even tried.
    time_us = timer(lambda tiles: 50.0 if isinstance(tiles, Tiles) and tiles.rows == 128 else 100.0)
    (found,) = tune(time_us, 2048).values()

    assert isinstance(found, Tiles) and found.rows == 128


def test_tiles_that_cannot_run_are_left_out() -> None:
    def out_of_resources(works: Works) -> float:
        raise RuntimeError("out of resource: shared memory")

    assert tune(out_of_resources, 2, 40) == {}


@pytest.mark.parametrize("tokens", often(0, [2, 40, 300]))
def test_kernels_of_all_candidates_run(tokens: int) -> None:
    failed = []

    def run(works: Works) -> float:
        try:
            works[0]()
        except Exception as problem:
            failed.append(problem)
        return 1.0

    assert tune(run, tokens) == {}
    assert failed == []


def test_what_is_found_is_an_option_that_chooses_the_tiles() -> None:
    # The layers of a model mostly have the same shape.
    mixtures = [EXPERTS, EXPERTS]
    found = tune_experts(mixtures, SHAPE.hidden, torch.bfloat16, CPU, rows_or(50.0))

    options = make_options(spec(), [f"triton.{name}={text}" for name, text in found.items()])
    tables = read_tables(options.expert_tiles)

    assert set(tables) == {KEY}
    assert choose_tiles(2, KEY, CPU, tables) == SMALLEST
    # Other shapes are cut up as before, and steps of more tokens than were measured like the last.
    assert choose_tiles(2, (8, 2, 48, 24), CPU, tables) == choose_tiles(2, (8, 2, 48, 24), CPU)
    assert choose_tiles(10**6, KEY, CPU, tables) == tables[KEY][-1][1]


@pytest.mark.full
def test_nothing_is_found_without_experts_or_where_nothing_is_faster() -> None:
    hidden, dtype = SHAPE.hidden, torch.bfloat16
    assert tune_experts([], hidden, dtype, CPU, rows_or(50.0)) == {}
    assert tune_experts([EXPERTS], hidden, dtype, CPU, timer(lambda tiles: 1.0)) == {}


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "[]",
        "{}x",
        '{"5-2-48": {}}',
        '{"5-2-48-24": 1}',
        '{"5-2-48-24": {"1": {}, "x": {}}}',
        '{"5-2-48-24": {"1": {"width": 2}}}',
        # Sizes by which a kernel would read what is not there, or is not compiled.
        '{"5-2-48-24": {"1": {"down": 3}}}',
        '{"5-2-48-24": {"1": {"warps": true}}}',
        '{"5-2-48-24": {"1": {"rows": 16, "gate_up": {"n": 16, "k": 32, "group": 0}, '
        '"down": {"n": 16, "k": 32}}}}',
    ],
)
def test_a_table_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expert_tiles: expected a table made by 'headstock tune'"):
        make_options(spec(), [f"triton.expert_tiles={text}"])


def test_a_layer_takes_its_tiles_from_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def watch(*arguments: Any, **more: Any) -> Tensor:
        asked.append(arguments[4])
        return mix_tiles(*arguments, **more)

    mix_tiles = mixtures.mix_tiles
    monkeypatch.setattr(mixtures, "mix_tiles", watch)
    config = config_of()
    params = ops_cases.params_of(config, torch.bfloat16, "cpu")
    batch = ops_cases.batch_of(config, 3, torch.bfloat16, "cpu")
    wanted = Tiles(rows=16, gate_up=Tile(n=16, k=32), down=Tile(n=32, k=32))

    def mix(options: TritonOptions) -> Tensor:
        ops = TritonOps(options)
        ops.bind(params, config)
        mixed = ops.moe(ops.embed(batch), config.layers[0], batch).pending
        assert mixed is not None
        return mixed

    by_default, none_asked = mix(TritonOptions()), list(asked)
    table = {"5-2-48-24": {"8": asdict(wanted)}}
    by_table = mix(TritonOptions(expert_tiles=json.dumps(table)))

    assert none_asked == [] and asked == [wanted]
    ops_cases.within(ops_cases.error(by_table, by_default), torch.bfloat16)


@pytest.mark.parametrize(
    ("device", "dtype", "fused"),
    [("cpu", "bfloat16", True), ("cuda", "float32", True), ("cuda", "bfloat16", False)],
)
def test_where_other_kernels_multiply_experts_nothing_is_measured(
    device: str, dtype: str, fused: bool
) -> None:
    query = PartQuery(
        model=config_of(),
        dtype=dtype,
        kv_dtype=dtype,
        formats=(),
        contiguous=False,
        max_rows=8,
        max_batch_tokens=64,
        max_seq_len=64,
    )
    env = DeviceEnv(device=device, torch="2.11.0")
    assert TritonOps(TritonOptions(fused_experts=fused)).tune(query, env) == {}
