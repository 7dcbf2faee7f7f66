"""How the work of experts is cut up: as measured for this GPU and shape, else by rule."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import torch
from attrs import frozen


@frozen(kw_only=True)
class RowTile:
    """Pairs (token, expert) one by one: rows of gate (and as many of up) and of down a program."""

    gate_up: int = 4
    down: int = 4
    warps: int = 4


@frozen(kw_only=True)
class Tile:
    """A product of blocks: columns and depth of a tile, and how many blocks share a column in turn.

    swap: the weight is the left factor, whose tile a Hopper takes in 64 rows where the tokens'
        would be padded to that
    tma: weights come by the tensor memory accelerator, from sm_90
    """

    n: int
    k: int
    warps: int = 4
    stages: int = 4
    group: int = 1
    swap: bool = False
    tma: bool = False


@frozen(kw_only=True)
class Tiles:
    """Both products of blocks of `rows` pairs."""

    rows: int
    gate_up: Tile
    down: Tile


_RULES: tuple[tuple[float, RowTile | Tiles], ...] = (
    (4, RowTile()),
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
"""The most pairs that an expert has on average -> the tiles, for any GPU.

The first entry is by the number of tokens.
"""


def choose_tiles(
    tokens: int, shape: tuple[int, int, int, int], device: torch.device
) -> RowTile | Tiles:
    """The tiles for so many tokens.

    shape: experts, experts per token, hidden, intermediate
    """
    # A table first: on an H200 at the 30B-A3B shape pairs one by one are faster at 1 token only,
    # where the rule takes them up to 4.
    measured = _read_measured(_name_gpu(device), shape)
    if measured:
        return next((tiles for most, tiles in measured if tokens <= most), measured[-1][1])
    if tokens <= _RULES[0][0]:
        return _RULES[0][1]
    mean = tokens * shape[1] / shape[0]
    return next(tiles for most, tiles in _RULES[1:] if mean <= most)


@cache
def _name_gpu(device: torch.device) -> str:
    """What the driver calls the GPU; "" for another device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


@cache
def _read_measured(
    gpu: str, shape: tuple[int, int, int, int]
) -> tuple[tuple[int, RowTile | Tiles], ...]:
    """What was measured on that GPU for that shape, by the most tokens of each entry, ascending."""
    name = "-".join([gpu.replace(" ", "_"), *map(str, shape)])
    path = files("headstock_triton") / "measured" / f"{name}.json"
    if not gpu or not path.is_file():
        return ()
    entries = json.loads(path.read_text())["tiles"]
    return tuple((int(most), _read_tiles(each)) for most, each in entries.items())


def _read_tiles(entry: Mapping[str, Any]) -> RowTile | Tiles:
    """An entry of a table as a record."""
    if "rows" not in entry:
        return RowTile(**entry)
    return Tiles(rows=entry["rows"], gate_up=Tile(**entry["gate_up"]), down=Tile(**entry["down"]))
