"""What the scheduler and plugins say to each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from toy_schedule import Drive
from toy_workloads import limits, prompt, random_requests, request

from headstock.builtin import mixed
from headstock.errors import PluginBroken
from headstock.spi import Budget, CachePolicy, CacheStats, Inserted, Match, ScheduleDecision, View
from headstock_radix_cache.policy import RadixCache


class Stranger(CachePolicy):
    """A policy as the first version of the contract had it: pages are indexed by `insert` alone."""

    def __init__(self, page_size: int, options: Any = None) -> None:
        self.inner = RadixCache(page_size)

    def new_index(self) -> Any:
        return self.inner.new_index()

    def match_prefix(self, index: Any, tokens: np.ndarray, namespace: str) -> Match:
        return self.inner.match_prefix(index, tokens, namespace)

    def hold(self, index: Any, handle: Any) -> None:
        self.inner.hold(index, handle)

    def release(self, index: Any, handle: Any) -> None:
        self.inner.release(index, handle)

    def insert(
        self, index: Any, handle: Any, tokens: np.ndarray, pages: np.ndarray, namespace: str
    ) -> Inserted:
        assert tokens.shape == (len(pages) * self.inner.page_size,)
        return self.inner.insert(index, handle, tokens, pages, namespace)

    def evict(self, index: Any, count: int) -> np.ndarray:
        return self.inner.evict(index, count)

    def count_evictable(self, index: Any) -> int:
        return self.inner.count_evictable(index)

    def evict_all(self, index: Any) -> np.ndarray:
        return self.inner.evict_all(index)

    def stats(self, index: Any) -> CacheStats:
        return self.inner.stats(index)

    def check_index(self, index: Any) -> None:
        self.inner.check_index(index)

    def indexed_pages(self, index: Any) -> np.ndarray:
        return self.inner.indexed_pages(index)


@pytest.mark.parametrize("seed", range(6))
def test_a_policy_without_insert_each_leads_to_the_same_plans(seed: int) -> None:
    plans = []
    for policy in (RadixCache(4), Stranger(4)):
        rng = np.random.default_rng(seed)
        drive = Drive(limits(policy=policy, num_pages=60, overlap=seed % 2 == 0))
        for one in random_requests(rng, wait_for_sample=False):
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
            "the scheduler 'mixed' returned None, not a ScheduleDecision; report it",
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
