"""Tile sizes of experts: as measured for this GPU and shape, else by rule."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import torch
from attrs import Attribute, field, frozen
from attrs.validators import ge, instance_of
from triton import next_power_of_2


def _is_power_of_two(record: object, attribute: Attribute[int], value: int) -> None:
    # Users may pass tables, and kernels cannot be compiled for other sizes.
    if type(value) is not int or value < 1 or value & (value - 1):
        raise ValueError(f"{attribute.name}: expected a power of two, got {value!r}")


@frozen(kw_only=True)
class RowTile:
    """Pairs (token, expert) one by one: rows of gate (and as many of up) and of down per
    program."""

    gate_up: int = field(default=4, validator=_is_power_of_two)
    down: int = field(default=4, validator=_is_power_of_two)
    warps: int = field(default=4, validator=_is_power_of_two)


@frozen(kw_only=True)
class Tile:
    """A product of blocks: columns and depth of a tile, and the number of consecutive blocks per
    column.

    swap: the weight is the left factor, whose tile has 64 rows on Hopper, to which tokens would be
        padded
    tma: weights are loaded by the tensor memory accelerator, from sm_90 on
    """

    n: int = field(validator=_is_power_of_two)
    k: int = field(validator=_is_power_of_two)
    warps: int = field(default=4, validator=_is_power_of_two)
    stages: int = field(default=4, validator=[instance_of(int), ge(1)])
    group: int = field(default=1, validator=[instance_of(int), ge(1)])
    swap: bool = field(default=False, validator=instance_of(bool))
    tma: bool = field(default=False, validator=instance_of(bool))


@frozen(kw_only=True)
class Tiles:
    """Both products of blocks of `rows` pairs."""

    rows: int = field(validator=_is_power_of_two)
    gate_up: Tile
    down: Tile


ROW_TILES = (
    RowTile(),
    RowTile(gate_up=4, down=2, warps=4),
    RowTile(gate_up=4, down=1, warps=4),
    RowTile(gate_up=4, down=1, warps=8),
    RowTile(gate_up=2, down=1, warps=16),
)
"""Tiles for pairs one by one, best first; the first that fits is used."""
_MOST_REGISTERS = 160
"""Registers of a thread available for the data of pairs one by one, out of 255."""
_RULES: tuple[tuple[float, Tiles], ...] = (
    (16, Tiles(rows=16, gate_up=Tile(n=32, k=128, stages=3), down=Tile(n=64, k=128, stages=3))),
    (32, Tiles(rows=32, gate_up=Tile(n=64, k=64, stages=3), down=Tile(n=128, k=64, stages=3))),
    (
        float("inf"),
        Tiles(
            rows=64,
            gate_up=Tile(n=64, k=32, stages=3, group=8),
            down=Tile(n=128, k=32, stages=3, group=8),
        ),
    ),
)
"""The maximum average number of pairs per expert -> the tiles, for any GPU."""
_HOPPER_RULES: tuple[tuple[float, Tiles], ...] = (
    (
        4,
        Tiles(
            rows=16,
            gate_up=Tile(n=32, k=256, stages=2, tma=True),
            down=Tile(n=128, k=128, stages=3, tma=True),
        ),
    ),
    (
        8,
        Tiles(
            rows=16,
            gate_up=Tile(n=64, k=128, stages=3, swap=True),
            down=Tile(n=128, k=128, stages=3, tma=True),
        ),
    ),
    (
        16,
        Tiles(
            rows=32,
            gate_up=Tile(n=64, k=128, stages=3, swap=True, tma=True),
            down=Tile(n=256, k=64, warps=8, stages=3, swap=True, tma=True),
        ),
    ),
    (
        32,
        Tiles(
            rows=64,
            gate_up=Tile(n=64, k=64, stages=3, tma=True),
            down=Tile(n=128, k=64, stages=3, tma=True),
        ),
    ),
    (
        64,
        Tiles(
            rows=128,
            gate_up=Tile(n=64, k=64, warps=8, stages=3, group=8, tma=True),
            down=Tile(n=128, k=64, warps=8, stages=3, group=8),
        ),
    ),
    (
        float("inf"),
        Tiles(
            rows=128,
            gate_up=Tile(n=128, k=64, warps=8, group=8, tma=True),
            down=Tile(n=256, k=64, warps=8, group=8, tma=True),
        ),
    ),
)
"""The same for GPUs of sm_90: the best on an H200 at the 30B-A3B shape, by its averages."""

_FP8_RULES: tuple[tuple[float, Tiles], ...] = (
    (
        64,
        Tiles(
            rows=64,
            gate_up=Tile(n=64, k=128, stages=3, tma=True),
            down=Tile(n=128, k=128, stages=3, tma=True),
        ),
    ),
    (
        float("inf"),
        Tiles(
            rows=128,
            gate_up=Tile(n=64, k=128, warps=8, stages=3, group=8, tma=True),
            down=Tile(n=128, k=128, warps=8, stages=3, group=8, tma=True),
        ),
    ),
)
"""The same for tokens in FP8; not measured. Sums of a step and of all are in registers."""
_LEAST_ROUNDED_PAIRS = 32
"""Average of an expert from which its products take longer than reading it."""


Table = tuple[tuple[int, RowTile | Tiles], ...]
"""Tiles by the maximum number of tokens, ascending."""
Shape = tuple[int, int, int, int]
"""Experts, experts per token, hidden, intermediate."""


def choose_tiles(
    tokens: int, shape: Shape, device: torch.device, tables: Mapping[Shape, Table] | None = None
) -> RowTile | Tiles:
    """The tiles for this number of tokens: from a table, else built-in measurements, else by
    rule."""
    # A table first: on an H200 at the 30B-A3B shape pairs one by one are only faster at 1 token,
    # while the rules use them for more.
    measured = (tables or {}).get(shape) or _read_measured(_name_gpu(device), shape)
    if measured:
        return next((tiles for most, tiles in measured if tokens <= most), measured[-1][1])
    return choose_by_rule(tokens, shape, hopper=is_hopper(device))


def choose_by_rule(tokens: int, shape: Shape, *, hopper: bool) -> RowTile | Tiles:
    """The tiles for this number of tokens and an unmeasured shape, on GPUs of sm_90 or others."""
    most_tokens = 2 if hopper else 4
    row_tile = fit_row_tile(*shape[1:])
    # Experts whose rows are wide enough for more warps are worth reading once for two tokens.
    if row_tile is not None and tokens <= (most_tokens if row_tile.warps == 4 else 1):
        return row_tile
    return choose_blocks(tokens, shape, hopper=hopper)


def choose_blocks(tokens: int, shape: Shape, *, hopper: bool) -> Tiles:
    """The same for products of blocks alone."""
    rules, mean = _HOPPER_RULES if hopper else _RULES, tokens * shape[1] / shape[0]
    return next(tiles for most, tiles in rules if mean <= most)


def choose_rounded(tokens: int, shape: Shape) -> Tiles | None:
    """The same for experts in FP8 whose tokens are rounded to it; None where that is no faster."""
    mean = tokens * shape[1] / shape[0]
    if mean <= _LEAST_ROUNDED_PAIRS:
        return None
    return next(tiles for most, tiles in _FP8_RULES if mean <= most)


def fit_row_tile(per_token: int, hidden: int, inters: int) -> RowTile | None:
    """The first tile whose rows fit the registers of their threads; None if none does."""
    fitting = (tile for tile in ROW_TILES if fits_registers(tile, per_token, hidden, inters))
    return next(fitting, None)


def fits_registers(tile: RowTile, per_token: int, hidden: int, inters: int) -> bool:
    """Whether the rows of such a tile fit the registers of its threads."""
    gate_up, down = (next_power_of_2(size) / (32 * tile.warps) for size in (hidden, inters))
    # Weights are 16 bits wide, a token and sums 32. Down holds the weights of all experts.
    held: float = max((tile.gate_up + 1) * gate_up, (per_token / 2 + 1) * tile.down * down)
    return held <= _MOST_REGISTERS


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether the device has Hopper's tensor cores and its tensor memory accelerator."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@cache
def _name_gpu(device: torch.device) -> str:
    """The driver's name of the GPU; "" for another device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


@cache
def _read_measured(gpu: str, shape: Shape) -> Table:
    """The measured tiles for that GPU and shape."""
    name = "-".join([gpu.replace(" ", "_"), *map(str, shape)])
    path = files("headstock_triton") / "measured" / f"{name}.json"
    if not gpu or not path.is_file():
        return ()
    return _read_table(json.loads(path.read_text())["tiles"])


def read_tables(text: str) -> dict[Shape, Table]:
    """Tables by shape, parsed from the text of `tune_experts`; none for an empty text.

    raises: ValueError
    """
    if not text:
        return {}
    try:
        return {_read_shape(name): _read_table(each) for name, each in json.loads(text).items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            "expert_tiles: expected a table made by 'headstock tune', got another text"
        ) from error


def _read_shape(name: str) -> Shape:
    count, per_token, hidden, inters = map(int, name.split("-"))
    return count, per_token, hidden, inters


def _read_table(entries: Mapping[str, Any]) -> Table:
    table = ((int(most), _read_tiles(each)) for most, each in entries.items())
    return tuple(sorted(table, key=lambda entry: entry[0]))


def _read_tiles(entry: Mapping[str, Any]) -> RowTile | Tiles:
    """An entry of a table as a record."""
    if "rows" not in entry:
        return RowTile(**entry)
    return Tiles(rows=entry["rows"], gate_up=Tile(**entry["gate_up"]), down=Tile(**entry["down"]))
