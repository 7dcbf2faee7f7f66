"""Random requests, aborts, bad inputs and faults through real engines, one engine after the other
and one all along, and through the scheduler alone, with guesses.

`python -m core.faults.soak --seconds 1800`, in the folder of tests, prints what was done; whatever
goes wrong ends it.
"""

from __future__ import annotations

import argparse
import gc
import logging
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from attrs import define, field
from toy_engine import EngineHarness, Toys, installed, random_requests, random_settings, request
from toy_workloads import simulate

from headstock.engine.engine import Engine
from headstock.scheduler import Request

from .census import allocated, objects, resident, settle, threads_and_files
from .rounds import Round, random_modes

LASTING = {"num_pages": 100, "max_running_requests": 32, "max_batch_tokens": 80}
"""The engine that lives all along."""
LEAST, WARM = 15, 40
"""Rounds at least, however slow the machine is, and after how many memory counts as taken."""
REQUESTS = 500
"""Requests at least between the two times when memory is weighed: by fewer it is chance."""
GROWTH = 10.0
"""MiB that may come on top of that: minutes of sound engines took 2 to 7, which malloc keeps."""


@define
class Tally:
    """What was done, and the memory that was in use once warm and at the end, in MiB.

    first_objects: the objects of the first time
    blocks: of memory once warm
    since: the requests until then
    """

    rounds: int = 0
    steps: int = 0
    requests: int = 0
    aborted: int = 0
    failed: int = 0
    refused: int = 0
    faults: int = 0
    cached_tokens: int = 0
    preempted: int = 0
    most_preemptions: int = 0
    warm: float = 0.0
    last: float = 0.0
    first_objects: dict[str, int] = field(factory=dict, repr=False)
    blocks: int = 0
    since: int = 0

    def add(self, finished: Round) -> None:
        """Count what came of a round."""
        harness = finished.harness
        reasons = list(harness.reasons.values())
        self.steps += harness.steps
        self.requests += len(reasons)
        self.aborted += reasons.count("abort")
        self.failed += reasons.count("error")
        self.refused += finished.refused
        self.preempted += sum(harness.preemptions.values())
        self.most_preemptions = max(self.most_preemptions, *harness.preemptions.values(), 0)

    def weigh(self, engine: Engine) -> None:
        """Note what is in use while the engine has nothing to do.

        raises: AssertionError when there are more threads, files or objects than the first time, or
        as many more blocks of memory than once warm as requests came since
        """
        # The engine keeps its last batch, which has more records where a row of it pools.
        EngineHarness(engine).run([request("last", [1, 2, 3], 2)])
        settle(engine)
        first_objects, blocks, self.last = (
            objects() | {"threads and files": threads_and_files()},
            allocated(),
            resident(),
        )
        self.first_objects = self.first_objects or first_objects
        grown = {
            name: f"{self.first_objects.get(name, 0)} to {count}"
            for name, count in first_objects.items()
        }
        grown = {
            name: growth
            for name, growth in grown.items()
            if first_objects[name] > self.first_objects.get(name, 0)
        }
        assert not grown, f"left behind: {grown}"
        if self.rounds < WARM:
            return
        if not self.blocks:
            self.warm, self.blocks, self.since = self.last, blocks, self.requests
        came = self.requests - self.since
        assert blocks - self.blocks <= came, (
            f"{blocks - self.blocks} blocks of memory were left behind by {came} requests"
        )
        assert self.last <= self.warm + GROWTH, f"memory grew from {self.warm} to {self.last} MiB"


def soak(
    seconds: float, toys: Toys, seed: int, report: Callable[[Tally], None] = lambda tally: None
) -> Tally:
    """Rounds of random work for so long; each drains and is judged.

    raises: AssertionError when a token is wrong, a page is lost, a request starves, or memory,
        threads or files grow
    """
    rng, tally, started = np.random.default_rng(seed), Tally(), time.monotonic()
    baseline = threads_and_files()
    lasting = toys.engine(**LASTING)
    EngineHarness(lasting).run(everywhere())
    tally.weigh(lasting)
    while (
        time.monotonic() - started < seconds
        or tally.rounds < LEAST
        or (tally.blocks and tally.requests - tally.since < REQUESTS)
    ):
        if tally.rounds in (2, WARM):
            tally.weigh(lasting)
        one_round(tally.rounds, lasting, toys, tally, rng)
        tally.rounds += 1
        report(tally)
    tally.weigh(lasting)
    tally.cached_tokens += lasting.stats().cached_tokens
    lasting.close()
    gc.collect()
    assert threads_and_files() <= baseline, (
        f"{threads_and_files()} threads and files, {baseline} before"
    )
    return tally


def everywhere() -> list[Request]:
    """Requests that leave on every seat what a seat keeps of its last request, and in every
    namespace.
    """
    rows = LASTING["max_running_requests"]
    kinds = {"stop_ids": (1,), "min_tokens": 2}
    return [
        request(str(i), [i] * 9, 3, namespace="other" if i % 2 else "", **kinds)
        for i in range(rows)
    ]


def one_round(
    number: int, lasting: Engine, toys: Toys, tally: Tally, rng: np.random.Generator
) -> None:
    """The scheduler alone, the engine that lasts, or one of its own: each in its turn."""
    if number % 3 == 0:
        for _ in range(2):
            simulate(int(rng.integers(2**31)))
        return
    requests = random_requests(rng, int(rng.integers(5, 40)), pooled=0.15)
    if number % 3 == 1:
        finished = Round(EngineHarness(lasting), rng, f"{number}/", requests)
        finished.run()
        tally.add(finished)
        return
    settings = random_settings(rng) | random_modes(rng)
    engine = toys.engine(**settings)
    finished = Round(EngineHarness(engine), rng, f"{number}/", requests, faults=settings["faults"])
    finished.run()
    tally.add(finished)
    tally.faults += len(finished.faults)
    tally.cached_tokens += engine.stats().cached_tokens
    engine.close()


@define
class Now:
    """A report that prints once in so many seconds."""

    seconds: float
    last: float = 0.0

    def __call__(self, tally: Tally) -> None:
        """Print the tally when it is time."""
        if time.monotonic() - self.last > self.seconds:
            self.last = time.monotonic()
            print(tally, flush=True)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    plugins, reports = tempfile.TemporaryDirectory(), tempfile.TemporaryDirectory()
    with plugins as folder, installed(Path(folder)) as toys, reports as aside:
        # Not the folder on the path: importlib keeps what it finds there for each time that the
        #     folder changes.
        tempfile.tempdir = aside
        print(f"seed {arguments.seed}, {arguments.seconds:.0f} s", flush=True)
        print("done:", soak(arguments.seconds, toys, arguments.seed, Now(60.0)))


if __name__ == "__main__":
    main()
