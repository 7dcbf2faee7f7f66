"""What the scheduler and plugins say to each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from often import often
from toy_workloads import FULL, limits, prompt, random_requests, request, window

from headstock.builtin import mixed
from headstock.errors import PluginBroken
from headstock.spi import (
    Budget,
    CachePolicy,
    CacheStats,
    Inserted,
    KVGroup,
    Match,
    ScheduleDecision,
    View,
)
from headstock_conformance.scheduler.toy_schedule import Drive
from headstock_radix_cache.policy import RadixCache


class Stranger(CachePolicy):
    """A policy as the first version of the contract had it: pages are indexed by `insert` alone."""

    def __init__(self, page_size: int, groups: Any, options: Any = None) -> None:
        self.inner = RadixCache(page_size, groups)

    def new_index(self) -> Any:
        return self.inner.new_index()

    def match_prefix(self, index: Any, keys: np.ndarray, namespace: str) -> Match:
        return self.inner.match_prefix(index, keys, namespace)

    def hold(self, index: Any, handle: Any) -> None:
        self.inner.hold(index, handle)

    def release(self, index: Any, handle: Any) -> None:
        self.inner.release(index, handle)

    def insert(
        self, index: Any, handle: Any, keys: np.ndarray, pages: np.ndarray, namespace: str
    ) -> Inserted:
        assert keys.shape == (pages.shape[1] * self.inner.page_size,)
        return self.inner.insert(index, handle, keys, pages, namespace)

    def hold_pages(self, index: Any, group: int, pages: np.ndarray) -> None:
        self.inner.hold_pages(index, group, pages)

    def release_pages(self, index: Any, group: int, pages: np.ndarray) -> None:
        self.inner.release_pages(index, group, pages)

    def evict(self, index: Any, group: int, count: int) -> Any:
        return self.inner.evict(index, group, count)

    def count_evictable(self, index: Any, group: int) -> int:
        return self.inner.count_evictable(index, group)

    def evict_all(self, index: Any) -> Any:
        return self.inner.evict_all(index)

    def stats(self, index: Any) -> CacheStats:
        return self.inner.stats(index)

    def check_index(self, index: Any) -> None:
        self.inner.check_index(index)

    def indexed_pages(self, index: Any, group: int) -> np.ndarray:
        return self.inner.indexed_pages(index, group)


@pytest.mark.parametrize("groups", [(FULL,), (FULL, window(9))], ids=["one group", "a window"])
@pytest.mark.parametrize("seed", often(2, range(6)))
def test_a_policy_without_insert_each_leads_to_the_same_plans(
    seed: int, groups: tuple[KVGroup, ...]
) -> None:
    plans = []
    for policy in (RadixCache(4, groups), Stranger(4, groups)):
        rng = np.random.default_rng(seed)
        drive = Drive(limits(policy=policy, groups=groups, num_pages=60, overlap=seed % 2 == 0))
        for one in random_requests(rng):
            drive.submit(one)
            drive.step()
        drive.drain(3_000)
        plans.append([plan.encode() for plan in drive.plans])
    assert plans[0] == plans[1] and len(plans[0]) > 20


def raises(view: View, budget: Budget) -> ScheduleDecision:
    raise ZeroDivisionError("of its own")


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        (raises, "the scheduler 'mixed' raised ZeroDivisionError: of its own; report it"),
        (
            lambda view, budget: None,
            "the scheduler 'mixed': expected a ScheduleDecision, got None; report it",
        ),
    ],
)
def test_a_scheduler_that_fails_is_named(schedule: Any, said: str) -> None:
    drive = Drive(limits(schedule=schedule))
    drive.submit(request("a", prompt(np.random.default_rng(2), 20)))
    with pytest.raises(PluginBroken, match=said):
        drive.step()


def test_a_scheduler_cannot_write_what_it_sees() -> None:
    def schedule(view: View, budget: Budget) -> ScheduleDecision:
        for seen in (
            view.rows_by_priority,
            view.num_computed_tokens,
            view.num_prompt_tokens,
            view.last_step,
        ):
            with pytest.raises(ValueError, match="read-only"):
                seen[:] = 1
        return mixed.schedule(view, budget)

    drive = Drive(limits(schedule=schedule))
    for name in "abc":
        drive.submit(request(name, prompt(np.random.default_rng(2), 20)))
    drive.drain()
    assert set(drive.reasons.values()) == {"length"}
