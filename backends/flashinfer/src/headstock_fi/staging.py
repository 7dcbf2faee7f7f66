"""Host memory from which a plan's arrays are copied to the device, and when it may be written.

A copy from pinned memory runs later than its call. A buffer that is rewritten too early would send
the wrong step. Each wrapper of the library therefore has its own buffers, and so does the library
inside each. Wrappers alternate, and a wrapper's turn begins when its last upload is done.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from headstock.spi.arrays import Ints
from headstock_fi.arrays import PageArrays

TURNS = 2
"""Alternating wrappers: one step computes while the next is planned."""


class Fence(Protocol):
    """A point in the device's work."""

    def record(self) -> None:
        """Set it after all work requested so far."""

    def synchronize(self) -> None:
        """Wait until the device is past it; nothing to wait for when it was never set."""


class NoFence:
    """For a device that copies at once."""

    def record(self) -> None:
        """Nothing runs later."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


def make_fence(device: torch.device) -> Fence:
    """A fence for the device."""
    if device.type != "cuda":
        return NoFence()
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


class StagedWrapper:
    """A wrapper with staging buffers for up to `rows` rows of `columns` pages.

    `static` are the buffers on the device that a graph's wrapper reads: page_start, pages,
    last_page_lens. `turn` counts the uses of the wrapper, to detect plans that were overwritten.
    """

    def __init__(
        self,
        wrapper: Any,
        rows: int,
        columns: int,
        device: torch.device,
        static: tuple[Tensor, ...] = (),
    ) -> None:
        self.wrapper = wrapper
        self.static = static
        self.rows = rows
        self.device = device
        self.fence = make_fence(device)
        self.turn = 0
        self.query_start, self.page_start, self.last_page_lens, self.places = (
            torch.empty(size, dtype=torch.int32, pin_memory=device.type == "cuda")
            for size in (rows + 1, rows + 1, rows, rows * columns)
        )

    def begin(self) -> None:
        """Start a plan: wait until the last one's upload is done."""
        self.fence.synchronize()

    def end(self) -> None:
        """Mark that all of the plan's uploads were requested."""
        self.fence.record()

    def stage(self, arrays: PageArrays) -> tuple[Tensor, Tensor, Tensor]:
        """The arrays in this wrapper's host memory: query_start, page_start, last_page_lens."""
        return (
            _copy_into(self.query_start, arrays.query_start),
            _copy_into(self.page_start, arrays.page_start),
            _copy_into(self.last_page_lens, arrays.last_page_lens),
        )

    def pages(self, table: Tensor, places: Ints) -> Tensor:
        """The pages at these positions of the table, row after row. [pages] int32, on the device"""
        # Page numbers are only on the device. The host only knows their positions, which it
        # uploads.
        index = _copy_into(self.places, places).to(self.device, non_blocking=True)
        return table.reshape(-1).index_select(0, index)

    def upload(self, table: Tensor, places: Ints, padding: int) -> Tensor:
        """Update the static buffers.

        They get the staged arrays, the pages at these positions of the table, and the dummy page
        for each of `padding` rows after them.

        returns: [pages] int32, the used part of the static list
        """
        page_start, pages, last_page_lens = self.static
        page_start.copy_(self.page_start, non_blocking=True)
        last_page_lens.copy_(self.last_page_lens, non_blocking=True)
        index = _copy_into(self.places, places).to(self.device, non_blocking=True)
        owned = len(places)
        torch.index_select(table.reshape(-1), 0, index, out=pages[:owned])
        pages[owned : owned + padding].zero_()
        return pages[: owned + padding]


class Ring:
    """Alternating wrappers."""

    def __init__(self, wrappers: list[StagedWrapper]) -> None:
        self.wrappers = wrappers
        self.turns = 0

    def next_wrapper(self) -> StagedWrapper:
        """The least recently planned wrapper."""
        staged = self.wrappers[self.turns % len(self.wrappers)]
        self.turns += 1
        staged.turn += 1
        return staged


def _copy_into(buffer: Tensor, array: Ints) -> Tensor:
    """The array in the first part of a host buffer.   writes: buffer"""
    part = buffer[: len(array)]
    part.numpy()[:] = array
    return part
