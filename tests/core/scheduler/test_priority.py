"""What a higher priority takes from a lower one, and what it must leave."""

from __future__ import annotations

import numpy as np
from toy_workloads import limits, prompt, request

from headstock_conformance.scheduler.toy_device import alone
from headstock_conformance.scheduler.toy_schedule import Drive

RNG = np.random.default_rng(31)


def running(drive: Drive) -> set[str]:
    """Return the ids of the running requests."""
    return {entry.request.id for entry in drive.state.requests_by_row if entry is not None}


def test_a_higher_priority_takes_pages_from_lower_ones_when_the_pool_is_full() -> None:
    drive = Drive(limits(num_pages=21, policy=None))
    low = [request(f"low{i}", prompt(RNG, 30), 8) for i in range(2)]
    high = request("high", prompt(RNG, 41), 8, priority=1)
    for one in low:
        drive.submit(one)
    drive.step()
    assert running(drive) == {"low0", "low1"}
    drive.submit(high)
    drive.step()

    assert "high" in running(drive) and drive.state.num_preempted == 1 and "low0" in running(drive)
    drive.drain()
    assert drive.outputs == {one.id: alone(one) for one in (*low, high)}


def test_an_equal_priority_takes_nothing() -> None:
    drive = Drive(limits(num_pages=20, policy=None))
    for name, length in (("a", 30), ("b", 30), ("c", 41)):
        drive.submit(request(name, prompt(RNG, length), 8, priority=1))
        drive.step()

    assert running(drive) == {"a", "b"} and drive.state.num_preempted == 0


def test_nobody_is_preempted_when_that_would_not_make_enough_room() -> None:
    drive = Drive(limits(num_pages=30, policy=None))
    drive.submit(request("same", prompt(RNG, 80), 20, priority=1))
    drive.submit(request("low", prompt(RNG, 12), 30))
    for _ in range(3):
        drive.step()
    drive.submit(request("high", prompt(RNG, 60), 8, priority=1))
    for _ in range(5):
        drive.step()

    assert running(drive) == {"same", "low"} and drive.state.num_preempted == 0
    drive.drain()
    assert drive.outputs["high"] and set(drive.reasons.values()) == {"length"}


def test_shared_pages_do_not_count_as_room_when_others_still_hold_them() -> None:
    drive = Drive(limits(num_pages=16))
    shared = prompt(RNG, 40)
    drive.submit(request("same", np.concatenate([shared, prompt(RNG, 4)]), 10, priority=1))
    for _ in range(3):
        drive.step()
    drive.submit(request("low", np.concatenate([shared, prompt(RNG, 4)]), 10))
    drive.step()
    assert running(drive) == {"same", "low"}
    drive.submit(request("high", prompt(RNG, 30), 2, priority=1))
    drive.step()

    assert drive.state.num_preempted == 0, (
        "the low one holds two pages of its own, and that is not enough"
    )
    drive.drain()
    assert set(drive.reasons.values()) == {"length"}
