"""What graphs are expected to take, from three that are captured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from attrs import define, field

from headstock.engine.assembly import Assembly
from headstock.engine.trial import between, graph_bytes

SIZES = (32, 24, 16, 8, 4, 2, 1)


@define
class Device:
    """A runner whose graphs share 1,000 bytes, and take 10 more and 2 a row each."""

    captured: tuple[int, ...] = ()
    history: list[tuple[int, ...]] = field(factory=list)
    fails: bool = False

    def buckets(self, most_rows: int) -> tuple[int, ...]:
        return tuple(size for size in SIZES if size <= most_rows)

    def capture(self, buckets: Sequence[int], report: Any) -> None:
        self.captured = ()
        if self.fails and buckets:
            raise RuntimeError("no")
        self.captured = tuple(buckets)
        self.history.append(self.captured)

    def free(self) -> int:
        return 50_000 - (1000 if self.captured else 0) - sum(10 + 2 * size for size in self.captured)

    def expect(self, rows: int) -> int:
        """What the trial says, and what is captured afterwards is nothing that counts."""
        parts: Any = {"executor": None, "sampling": None}
        return graph_bytes(Assembly(runner=self, device=torch.device("cpu"), **parts), rows, self.free)


@pytest.mark.parametrize("rows", [1, 2, 4, 8, 32])
def test_G10_graphs_are_counted_from_three_captures(rows: int) -> None:
    device = Device()
    expected = device.expect(rows)
    device.capture(device.buckets(rows), None)

    assert expected == 50_000 - device.free()
    assert max(len(each) for each in device.history[:-1]) <= 2


def test_G10_no_buckets_take_nothing_and_a_failed_capture_counts_for_nothing() -> None:
    assert Device().expect(0) == 0
    assert Device(fails=True).expect(8) == 0


def test_between_is_a_line() -> None:
    assert between({1: 10, 9: 90}, (9, 5, 1)) == 150
    assert between({}, ()) == 0
