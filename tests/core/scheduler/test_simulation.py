"""A thousand random engines and workloads, 25 of them by default.

All drain, and every request gets the tokens that it gets when it runs alone. A soak goes on with
others.
"""

from __future__ import annotations

import pytest
from often import often
from toy_workloads import simulate

BLOCKS = [(0, 12), (12, 38), *((first, 50) for first in range(50, 1000, 50))]


@pytest.mark.feature("I11", "I12")
@pytest.mark.parametrize(("first", "count"), often(1, BLOCKS))
def test_a_thousand_workloads_drain_with_nothing_lost(first: int, count: int) -> None:
    preemptions = sum(simulate(seed).state.num_preempted for seed in range(first, first + count))

    assert preemptions > 10, "the workloads no longer put the pool under pressure"
