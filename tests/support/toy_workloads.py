"""Random engines and requests for the scheduler's tests, over the shipped schedulers and radix."""

from __future__ import annotations

from typing import Any

import numpy as np

from headstock.builtin import decode_first, equal_length, mixed, prefill_first
from headstock.scheduler import Limits
from headstock.spi import CachePolicy, ScheduleFunction
from headstock_conformance.scheduler import workloads
from headstock_conformance.scheduler.toy_schedule import Drive
from headstock_conformance.scheduler.workloads import (
    FULL,
    LONGEST,
    STATE,
    fewest_pages,
    prompt,
    random_requests,
    request,
    to_pooling,
    window,
)
from headstock_radix_cache.policy import RadixCache

__all__ = [
    "FULL",
    "LONGEST",
    "NAMES",
    "SCHEDULERS",
    "STATE",
    "fewest_pages",
    "limits",
    "prompt",
    "random_limits",
    "random_requests",
    "request",
    "simulate",
    "to_pooling",
    "window",
]

SCHEDULERS: dict[str, ScheduleFunction] = {
    "mixed": mixed.schedule,
    "prefill-first": prefill_first.schedule,
    "decode-first": decode_first.schedule,
    "equal-length": equal_length.schedule,
}
NAMES = tuple(SCHEDULERS)


def limits(**changes: Any) -> Limits:
    """Return small limits; radix index on unless `policy` or a state group says otherwise.

    A number of pages is that of every group; a state group has a page for each row.
    """
    size = changes.setdefault("page_size", 4)
    groups = changes.setdefault("groups", (FULL,))
    scheduler = changes.setdefault("scheduler", "mixed")
    policy: CachePolicy | None = None if STATE in groups else RadixCache(size, groups)
    schedule = changes.pop("schedule", SCHEDULERS[scheduler])
    return workloads.make_limits(schedule, **({"policy": policy} | changes))


def random_limits(rng: np.random.Generator, scheduler: str) -> Limits:
    """Return limits of any shape that can serve every request of `random_requests`."""
    return workloads.random_limits(rng, SCHEDULERS[scheduler], scheduler, RadixCache)


def simulate(seed: int) -> Drive:
    """Run one random workload to its end, by one of the schedulers in turn."""
    name = NAMES[seed % len(NAMES)]
    return workloads.simulate(seed, SCHEDULERS[name], name, RadixCache)
