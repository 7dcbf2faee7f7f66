"""Random requests, aborts, bad inputs and faults through real engines, one engine after the other and one all along.

`python -m core.faults.soak --seconds 1800`, in the folder of tests, prints what was done; whatever goes wrong ends it.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from attrs import define, evolve
from toy_engine import GREEDY, LONGEST, Toys, Trial, installed, random_requests, random_settings, request

from headstock.engine.engine import Engine
from headstock.errors import CapacityError, RequestError
from headstock.schedule import Request

KINDS = ("nan@{}:{}", "execute@{}", "wait@{}")
LASTING = {"num_pages": 300, "max_running_requests": 32, "max_batch_tokens": 80}
"""The engine that lives all along."""
WARM = 0.2
"""The share of the time after which memory counts as taken."""


@define
class Tally:
    """What was done, and the most memory that was in use once warm and at the end, in MiB."""

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

    def add(self, trial: Trial, refused: int) -> None:
        """Count what came of a trial that has drained."""
        reasons = list(trial.reasons.values())
        self.rounds += 1
        self.steps += trial.steps
        self.requests += len(reasons)
        self.aborted += reasons.count("abort")
        self.failed += reasons.count("error")
        self.refused += refused
        self.preempted += sum(trial.preemptions.values())
        self.most_preemptions = max(self.most_preemptions, *trial.preemptions.values())


def soak(seconds: float, toys: Toys, seed: int, report: Callable[[Tally], None] = lambda tally: None) -> Tally:
    """Rounds of random work for so long; each drains and is judged.

    raises: AssertionError when a token is wrong, a page is lost, a request starves, or memory, threads or files grow
    """
    rng, tally, started = np.random.default_rng(seed), Tally(), time.monotonic()
    baseline = threads_and_files()
    lasting = toys.engine(**LASTING)
    while (spent := time.monotonic() - started) < seconds:
        if tally.rounds % 2:
            treat(lasting, tally, rng)
        else:
            settings = random_settings(rng) | random_modes(rng)
            engine = toys.engine(**settings)
            treat(engine, tally, rng)
            tally.faults += len(settings["faults"])
            tally.cached_tokens += engine.stats().cached_tokens
            engine.close()
        tally.last = resident()
        tally.warm = max(tally.warm, tally.last) if spent < WARM * seconds or tally.rounds < 3 else tally.warm
        report(tally)
    tally.cached_tokens += lasting.stats().cached_tokens
    lasting.close()
    gc.collect()
    assert tally.last <= max(tally.warm * 1.05, tally.warm + 30), f"memory grew from {tally.warm} to {tally.last} MiB"
    assert threads_and_files() <= baseline, f"{threads_and_files()} threads and files, {baseline} before"
    return tally


def treat(engine: Engine, tally: Tally, rng: np.random.Generator) -> None:
    """One round: requests come while others run, some are aborted, a tenth is bad; now and then prefixes are reset."""
    trial, refused = Trial(engine), 0
    todo = renamed(random_requests(rng, int(rng.integers(5, 80))), tally.rounds)
    while todo or engine.has_work:
        if todo and rng.random() < 0.4:
            one = todo.pop()
            refused += offer_bad(engine, one, rng) if rng.random() < 0.1 else 0
            refused += offer(trial, one)
        if todo and trial.reasons and rng.random() < 0.05:
            refused += offer(trial, follow_up(trial, rng))
        if trial.requests and rng.random() < 0.03:
            engine.abort(str(rng.choice(list(trial.requests))))
        if rng.random() < 0.01:
            engine.reset_prefix_cache()
        trial.step()
        assert trial.steps < 20_000, f"{engine.config} does not end"
    trial.drain()
    tally.add(trial, refused)


def offer(trial: Trial, one: Request) -> int:
    """Submit a request; 1 when an engine that refuses under pressure did so."""
    try:
        trial.submit(one)
    except CapacityError:
        assert trial.engine.config.on_pressure == "reject", "a request that fits was refused"
        del trial.requests[one.id], trial.outputs[one.id]
        return 1
    return 0


def follow_up(trial: Trial, rng: np.random.Generator) -> Request:
    """A request that goes on from one that has ended, as the next turn of a talk does."""
    name = str(rng.choice(list(trial.reasons)))
    last = trial.requests[name]
    tokens = [*last.prompt.tolist(), *trial.outputs[name], int(rng.integers(0, 50))][: LONGEST - 10]
    return request(f"{name}/{trial.steps}", tokens, 10, params=GREEDY, namespace=last.namespace)


def renamed(requests: list[Any], round_number: int) -> list[Any]:
    """The requests under names of this round."""
    return [evolve(one, id=f"{round_number}/{one.id}") for one in requests]


def offer_bad(engine: Engine, one: Any, rng: np.random.Generator) -> int:
    """Submit a request that no engine takes; 1 when it was refused."""
    bad = [
        request("empty", []),
        request("unknown", [999]),
        request("negative", [-1]),
        evolve(one, id="long", max_tokens=10_000),
        request("nothing", [1], 0),
    ]
    try:
        engine.submit(bad[int(rng.integers(len(bad)))])
    except RequestError:
        return 1
    raise AssertionError("a bad request was taken")


def random_modes(rng: np.random.Generator) -> dict[str, Any]:
    """Faults, and now and then a mode that keeps less, refuses more or watches free pages."""
    modes: dict[str, Any] = {"faults": random_faults(rng), "debug_canary": bool(rng.random() < 0.3)}
    if rng.random() < 0.2:
        modes["prefix_cache_n"] = int(rng.integers(0, 3))
    if rng.random() < 0.1:
        modes |= {"kv_cache": False, "max_batch_tokens": 512}  # every token again in every step
    if rng.random() < 0.1:
        modes |= {"on_pressure": "reject", "memory_threshold": float(rng.choice([0.3, 0.6, 0.9]))}
    return modes


def random_faults(rng: np.random.Generator) -> tuple[str, ...]:
    """Up to four faults."""
    drawn = (str(rng.choice(KINDS)) for _ in range(int(rng.integers(0, 5))))
    return tuple(kind.format(rng.integers(0, 150), rng.integers(0, 8)) for kind in drawn)


def resident() -> float:
    """Memory in use, MiB; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    except OSError:
        return 0.0


def threads_and_files() -> int:
    """Threads that run and files that are open."""
    folder = Path("/proc/self/fd")
    return threading.active_count() + (len(os.listdir(folder)) if folder.exists() else 0)


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
    asked = parser.parse_args()
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder, installed(Path(folder)) as toys:
        tempfile.tempdir = folder
        print(f"seed {asked.seed}, {asked.seconds:.0f} s", flush=True)
        print("done:", soak(asked.seconds, toys, asked.seed, Now(60.0)))


if __name__ == "__main__":
    main()
