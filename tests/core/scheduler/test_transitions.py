"""Transitions of unfair schedulers, mixed tenants and pages that are not shared are noticed."""

from __future__ import annotations

import numpy as np
import pytest
from toy_workloads import limits, prompt, request

from headstock.builtin import mixed
from headstock.scheduler import admission, prefix_insert
from headstock.spi import Budget, ScheduleDecision, ScheduleFunction, View
from headstock_conformance.scheduler.toy_schedule import Drive
from headstock_radix_cache.policy import RadixCache


def preempting(last: bool) -> ScheduleFunction:
    """Return a scheduler that preempts a running row in every third step.

    That is the row of the lowest priority or, when not `last`, each in turn.
    """

    def schedule(view: View, budget: Budget) -> ScheduleDecision:
        count = len(view.rows_by_priority)
        if view.step % 3 or not count:
            return mixed.schedule(view, budget)
        victim = view.rows_by_priority[-1 if last else view.step // 3 % count :][:1]
        return ScheduleDecision(
            rows=view.rows_by_priority[:0], counts=view.rows_by_priority[:0], victims=victim
        )

    return schedule


@pytest.mark.parametrize(
    ("last", "said"), [(False, "of 0 and 1, the older one was"), (True, "1 was .* too often: 2")]
)
def test_requests_that_are_preempted_in_turn_are_noticed(last: bool, said: str) -> None:
    rng = np.random.default_rng(0)
    drive = Drive(limits(schedule=preempting(last)))
    for name in "01":
        drive.submit(request(name, prompt(rng, 20), 30))

    with pytest.raises(AssertionError, match=said):
        drive.drain(200)


def test_without_a_cache_requests_wait_for_what_the_others_take_in_every_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(0)

    def run() -> Drive:
        drive = Drive(
            limits(
                scheduler="equal-length", policy=None, recompute=True, num_pages=30, overlap=True
            )
        )
        for number in range(6):
            drive.submit(request(str(number), prompt(rng, 20 + 7 * number), 30))
        drive.drain(3_000)
        return drive

    assert set(run().reasons.values()) == {"length"}
    monkeypatch.setattr(
        admission, "count_missing_pages", lambda state, group, stays: int(np.count_nonzero(stays))
    )
    with pytest.raises(AssertionError, match="too often"):
        run()


def test_a_tenant_that_reads_what_another_computed_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    match_prefix = RadixCache.match_prefix
    monkeypatch.setattr(
        RadixCache,
        "match_prefix",
        lambda self, index, tokens, namespace: match_prefix(self, index, tokens, "one"),
    )
    drive, tokens = Drive(limits()), prompt(np.random.default_rng(0), 20)
    drive.submit(request("a", tokens, 3, namespace="one"))
    drive.drain()
    drive.submit(request("b", tokens, 3, namespace="two"))

    with pytest.raises(AssertionError, match="b reads pages of another tenant"):
        drive.step()


def test_rows_that_begin_alike_on_pages_of_their_own_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefix_insert, "dedup_pages", lambda *_: None)
    drive, tokens = Drive(limits(check=False)), prompt(np.random.default_rng(0), 3)
    for name in "ab":  # shorter than a page, so that neither waits for the other
        drive.submit(request(name, tokens, 30))
    for _ in range(8):
        drive.step()
    drive.submit(request("c", [1], 3))

    with pytest.raises(AssertionError, match="have a common prefix on separate pages"):
        drive.drain()
