"""A thousand random engines and workloads: all drain, and every request gets the tokens that it gets when it runs
alone.
"""

from __future__ import annotations

import numpy as np
import pytest

from headstock.schedule.check import check

from .toy import Drive, alone
from .workloads import SCHEDULERS, random_limits, random_requests

NAMES = tuple(SCHEDULERS)


def simulate(seed: int) -> int:
    """Run one workload; how often it preempted."""
    rng = np.random.default_rng(seed)
    limits = random_limits(rng, NAMES[seed % len(NAMES)])
    drafting = rng.random() < 0.4
    drive = Drive(limits, rng if drafting else None)
    todo = requests = random_requests(rng, fenced=drafting)
    while todo or drive.busy:
        while todo and rng.random() < 0.3:
            drive.submit(todo[0])
            todo = todo[1:]
        plan = drive.step()
        assert plan.num_tokens <= limits.max_batch_tokens
        assert len(drive.plans) < 20_000, f"seed {seed} does not drain"
        if len(drive.plans) % 16 == 0:
            check(drive.state, limits)
    check(drive.state, limits)
    assert drive.outputs == {request.id: alone(request) for request in requests}, f"seed {seed}"
    assert set(drive.reasons.values()) <= {"stop", "length"}
    assert not np.count_nonzero(drive.state.refs[0])
    return drive.state.num_preempted


@pytest.mark.parametrize("block", range(10))
def test_I11_I12_a_thousand_workloads_drain_with_nothing_lost(block: int) -> None:
    preemptions = sum(simulate(seed) for seed in range(block * 100, block * 100 + 100))

    assert preemptions > 20, "the workloads no longer put the pool under pressure"
