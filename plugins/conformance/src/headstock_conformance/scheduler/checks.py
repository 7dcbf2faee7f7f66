"""The cases of a scheduler: the toy model's tokens, invariants, and no starvation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from headstock import registry
from headstock.scheduler import Limits, Request
from headstock.spi import (
    Budget,
    DeviceEnv,
    ScheduleDecision,
    ScheduleFunction,
    SchedulerSpec,
    View,
)
from headstock_conformance.case import Case
from headstock_conformance.scheduler.toy_device import alone
from headstock_conformance.scheduler.toy_schedule import Drive
from headstock_conformance.scheduler.workloads import (
    LONGEST,
    make_limits,
    prompt,
    random_requests,
    request,
    simulate,
)

SEEDS_A_CASE = 5
RANDOM_CASES = 6
MOST_STEPS = 5_000
"""Number of steps after which unfinished requests count as starved."""


def list_cases(spec: SchedulerSpec, env: DeviceEnv, *, opt: Sequence[str] = ()) -> tuple[Case, ...]:
    """All cases of a scheduler; independent of the machine."""
    schedule: ScheduleFunction = registry.make_schedule(spec, opt)
    named: dict[str, Callable[..., object]] = {
        "one request": check_one,
        "a view without rows or requests": check_empty,
        "the same view gives the same decision": check_pure,
        "a batch smaller than the prompts": check_chunks,
        "a pool that is too small for all": check_pressure,
        "requests of higher priority come later": check_priorities,
        "a region for each sequence": check_regions,
    }
    cases = [Case(name, partial(run, spec.name, schedule)) for name, run in named.items()]
    for number in range(RANDOM_CASES):
        seeds = range(number * SEEDS_A_CASE, (number + 1) * SEEDS_A_CASE)
        text = f"random engines and requests {seeds[0]} to {seeds[-1]}"
        cases.append(Case(text, partial(check_random, spec.name, schedule, seeds)))
    return tuple(cases)


def run_to_end(limits: Limits, *requests: Request, steps_between: int = 0) -> Drive:
    """Run requests that arrive `steps_between` steps after each other, and compare their tokens.

    raises: AssertionError when a request has other tokens than alone, or does not finish
    """
    drive = Drive(limits)
    for one in requests:
        drive.submit(one)
        for _ in range(steps_between):
            drive.step()
    for _ in range(MOST_STEPS):
        if not drive.busy:
            break
        drive.step()
    assert not drive.busy, (
        f"{drive.state.num_running} requests run and {len(drive.state.waiting)} wait after "
        f"{MOST_STEPS} steps: some request is never run"
    )
    for one in requests:
        assert drive.outputs[one.id] == alone(one), f"request {one.id} has other tokens than alone"
    return drive


def make_requests(count: int, length: int, seed: int = 0, **changes: object) -> list[Request]:
    """Requests of random prompts."""
    rng = np.random.default_rng(seed)
    return [request(str(i), prompt(rng, length), 12, **changes) for i in range(count)]


def check_one(name: str, schedule: ScheduleFunction) -> None:
    """A single request finishes in about as many steps as it has tokens."""
    drive = run_to_end(make_limits(schedule, scheduler=name), *make_requests(1, 20))
    assert len(drive.plans) <= 40, f"a request of 12 tokens takes {len(drive.plans)} steps"


def check_empty(name: str, schedule: ScheduleFunction) -> None:
    """With nothing to run, the decision runs nothing."""
    drive = Drive(make_limits(schedule, scheduler=name))
    plan = drive.step()
    assert not len(plan.rows), "rows run although none is in use"


def check_pure(name: str, schedule: ScheduleFunction) -> None:
    """The scheduler is a function: the same view gives the same decision, and the view stays
    unchanged."""

    def ask_twice(view: View, budget: Budget) -> ScheduleDecision:
        first, second = schedule(view, budget), schedule(view, budget)
        for field in ("rows", "counts", "admit", "victims", "ask_again_ms"):
            assert np.array_equal(getattr(first, field), getattr(second, field)), (
                f"the same view gives other {field} when called again"
            )
        return second

    rng = np.random.default_rng(3)
    requests = [one for one in random_requests(rng) if not one.prompt_logprobs]
    run_to_end(make_limits(ask_twice, scheduler=name), *requests, steps_between=1)


def check_chunks(name: str, schedule: ScheduleFunction) -> None:
    """Prompts take several steps."""
    limits = make_limits(schedule, scheduler=name, max_batch_tokens=7, max_rows=5)
    run_to_end(limits, *make_requests(9, 50), steps_between=2)


def check_pressure(name: str, schedule: ScheduleFunction) -> None:
    """Rows are preempted and recomputed."""
    limits = make_limits(schedule, scheduler=name, num_pages=40, max_rows=6)
    run_to_end(limits, *make_requests(12, 90))


def check_priorities(name: str, schedule: ScheduleFunction) -> None:
    """New requests of higher priority do not starve earlier ones."""
    low, high = make_requests(6, 60), make_requests(6, 30, seed=1, priority=1)
    both = [*low, *(request(f"high {one.id}", one.prompt, 12, priority=1) for one in high)]
    run_to_end(
        make_limits(schedule, scheduler=name, num_pages=60, max_rows=4), *both, steps_between=1
    )


def check_regions(name: str, schedule: ScheduleFunction) -> None:
    """Contiguous mode: a page is the whole region of a sequence."""
    limits = make_limits(
        schedule, scheduler=name, page_size=LONGEST, num_pages=4, max_rows=4, max_regions=4
    )
    run_to_end(limits, *make_requests(10, 40), steps_between=1)


def check_random(name: str, schedule: ScheduleFunction, seeds: range) -> None:
    """Engines and requests of any shape, with drafts, pauses, windows and overlap."""
    for seed in seeds:
        simulate(seed, schedule, name)
