"""The library's schedule of a step's tiles, made once for all equal layers.

FlashAttention-3 counts the tiles of a step by the lengths on the device, in a separate launch
before each call. The result does not depend on queries or keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor

if TYPE_CHECKING:
    from headstock_fa.step import FlashPlan

TILE_QUERIES = 128
"""Queries of a KV head that a processor handles at once."""
KEYS_MEANWHILE = 80
"""Keys of a KV head that a device reads while one of its processors computes one key of a tile.

On an H100 a tile of 2,048 keys took 26 us, in which the device reads 168,000 keys of 128 numbers
with their values. Types and sizes of heads scale both times equally.
"""
SHARES = (4, 2, 1)
"""Schedules are made for a quarter of the processors, for half and for all of them."""


@frozen(eq=False)
class TileSchedule:
    """The tensor that the library reads, and the function that makes it from a plan's current
    step."""

    # `make` must not reference the plan, which references this: a cycle would keep the memory of
    # each step until a garbage collection, which is rare in a server.
    tensor: Tensor
    make: Callable[[FlashPlan], Tensor]

    def update(self, plan: FlashPlan) -> None:
        """Rewrite it at the same address.   writes: the tensor"""
        self.tensor.copy_(self.make(plan))


@frozen(kw_only=True, eq=False)
class SharedWork:
    """The work of attention to shared prefixes, and the reads next to it.

    query_start: [groups + 1] int32, where the rows of each group begin
    prefix_lens: [groups] int32, the tokens that they share    rest_lens: [rows] int32
    group: query heads of a KV head
    """

    query_start: Tensor
    prefix_lens: Tensor
    rest_lens: Tensor
    group: int


def list_margins(processors: int) -> tuple[int, ...]:
    """The number of processors that each schedule leaves free."""
    return tuple(processors - processors // share for share in SHARES)


Choice = Callable[[Sequence[Tensor], SharedWork, int], Tensor]


def choose_schedule(schedules: Sequence[Tensor], work: SharedWork, processors: int) -> Tensor:
    """The schedule with the fewest processors that finishes before the rest of the rows is read.

    Prefixes are compute-bound, the rest is memory-bound: in parallel, neither slows the other as
    long as enough processors read.

    schedules: int32, all of one size, for as many processors each as `list_margins` leaves
    """
    # Prefixes on all processors of an H100 delay the rest: 256 rows of 2,048 shared tokens and 160
    # others took 87 us a layer, and 79 with prefixes on a quarter of the processors. But for 32,768
    # shared tokens, a quarter took 435 us instead of 187.
    return _load_choice(schedules[0].device.type)(schedules, work, processors)


@cache
def _load_choice(device: str) -> Choice:
    """One kernel if Triton is installed, else torch operations."""
    if device != "cuda" or find_spec("triton") is None:
        return choose_in_torch
    # Imported late: without a GPU, Triton may be missing.
    from headstock_fa.schedule_kernel import choose_in_kernel

    return choose_in_kernel


def choose_in_torch(schedules: Sequence[Tensor], work: SharedWork, processors: int) -> Tensor:
    """See `choose_schedule`."""
    queries = work.query_start.diff() * work.group
    tiles = -(-queries // TILE_QUERIES)
    keys = (tiles.float() * work.prefix_lens).sum()
    wanted = keys * KEYS_MEANWHILE / work.rest_lens.float().sum()
    limits = wanted.new_tensor([processors // share for share in SHARES[:-1]])
    return torch.stack(tuple(schedules)).index_select(0, (wanted > limits).sum()[None])[0]
