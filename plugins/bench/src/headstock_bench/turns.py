"""Contestants at the same work, in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Protocol

from attrs import field, frozen

from headstock.errors import describe_error
from headstock_bench.latency import Latency
from headstock_bench.workloads import Workload

OutputTokens = tuple[tuple[int, ...], ...]
"""The requested output tokens of every request, in order."""


@frozen
class TimedRun:
    """One contestant at one workload once: wall seconds from the first request handed over to the
    last token.

    latency: None where the requests are handed over all at once
    """

    seconds: float
    tokens: OutputTokens = field(repr=False)
    latency: Latency | None = None


class BenchmarkEngine(Protocol):
    """Somebody who can do the work."""

    engine: str
    mode: str
    version: str

    def run(self, workload: Workload) -> TimedRun:
        """Do it once. Whatever makes a second run easier than the first is undone before the clock
        starts.
        """


@frozen(kw_only=True)
class EngineTiming:
    """What a contestant needed; `error` says why it could not do the work at all, and then there
    are no runs.

    seconds: one a run, the warm-up left out    tokens: of the last run
    latencies: one a run, where requests come one by one
    """

    engine: str
    mode: str
    version: str
    seconds: tuple[float, ...] = ()
    tokens: OutputTokens = field(default=(), repr=False)
    latencies: tuple[Latency, ...] = ()
    error: str | None = None

    @property
    def median(self) -> float:
        """The median of the runs, in seconds."""
        return median(self.seconds)


RunCallback = Callable[[str, int, int], None]


def run_in_turns(
    contestants: Sequence[BenchmarkEngine],
    workload: Workload,
    runs: int,
    report: RunCallback | None = None,
) -> list[EngineTiming]:
    """The timings, in the contestants' order: one warm-up each, then `runs` rounds in which
    everyone runs once.

    A contestant other than the first that fails in its warm-up is left out, and its timing says
    why.
    """
    errors = [None, *(warm_up(each, workload) for each in contestants[1:])]
    contestants[0].run(workload.warm_up)
    done: list[list[TimedRun]] = [[] for _ in contestants]
    for count in range(runs):
        for each, error, mine in zip(contestants, errors, done, strict=True):
            if error is None:
                mine.append(each.run(workload))
        if report is not None:
            report(f"runs of {workload.name}", count + 1, runs)
    return [summarize_runs(*one) for one in zip(contestants, errors, done, strict=True)]


def warm_up(contestant: BenchmarkEngine, workload: Workload) -> str | None:
    """Let it run once; why it cannot, if it cannot."""
    try:
        contestant.run(workload.warm_up)
    except Exception as error:
        return describe_error(error)
    return None


def summarize_runs(
    contestant: BenchmarkEngine, error: str | None, runs: Sequence[TimedRun]
) -> EngineTiming:
    """What the contestant's runs come to."""
    return EngineTiming(
        engine=contestant.engine,
        mode=contestant.mode,
        version=contestant.version,
        seconds=tuple(run.seconds for run in runs),
        tokens=runs[-1].tokens if runs else (),
        latencies=tuple(run.latency for run in runs if run.latency is not None),
        error=error,
    )


@frozen
class TokenDifference:
    """Where two contestants' tokens part: how many requests differ, and the earliest output
    position of all.
    """

    requests: int
    first: int | None


def find_difference(ours: OutputTokens, theirs: OutputTokens) -> TokenDifference:
    """Where the tokens part.

    raises: ValueError when the numbers of requests or of their tokens differ
    """
    firsts = []
    for left, right in zip(ours, theirs, strict=True):
        unequal = [
            position for position, (a, b) in enumerate(zip(left, right, strict=True)) if a != b
        ]
        firsts += unequal[:1]
    return TokenDifference(len(firsts), min(firsts, default=None))
