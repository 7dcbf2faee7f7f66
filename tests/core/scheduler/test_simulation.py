"""A thousand random engines and workloads, fifty of them by default.

All drain, and every request gets the tokens that it gets when it runs alone. A soak goes on with
others.
"""

from __future__ import annotations

import pytest
from often import often
from toy_workloads import simulate


@pytest.mark.feature("I11", "I12")
@pytest.mark.parametrize("block", often(1, range(20)))
def test_a_thousand_workloads_drain_with_nothing_lost(block: int) -> None:
    preemptions = sum(
        simulate(seed).state.num_preempted for seed in range(block * 50, block * 50 + 50)
    )

    assert preemptions > 10, "the workloads no longer put the pool under pressure"
