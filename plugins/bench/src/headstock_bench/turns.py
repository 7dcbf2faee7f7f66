"""Engines that alternate on the same workload, and where their tokens differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Protocol

from attrs import field, frozen

from headstock.errors import describe_error
from headstock_bench.latency import Latency
from headstock_bench.workloads import Workload

OutputTokens = tuple[tuple[int, ...], ...]
"""The output tokens of each request, in order, without any beyond the requested number."""


@frozen
class TimedRun:
    """One run of a workload.

    seconds: wall time from the submission of the first request to the last token
    latency: None where the requests are submitted all at once
    """

    seconds: float
    tokens: OutputTokens = field(repr=False)
    latency: Latency | None = None


class BenchmarkEngine(Protocol):
    """An engine that a benchmark can run; `mode` names one of several ways to run it."""

    engine: str
    mode: str
    version: str

    def run(self, workload: Workload) -> TimedRun:
        """Run the workload once.

        Before the clock starts it undoes whatever would make a second run faster, such as a cache.
        """


@frozen(kw_only=True)
class EngineTiming:
    """The timed runs of one engine.

    seconds: one a run    tokens: of the last run
    latencies: one a run, where requests come one by one
    error: why the engine could not run the workload at all; then there are no runs
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
"""Called with a workload's name, how many of its timed runs are done, and how many there are."""


def run_in_turns(
    engines: Sequence[BenchmarkEngine],
    workload: Workload,
    num_runs: int,
    on_run: RunCallback | None = None,
) -> list[EngineTiming]:
    """Warm each engine up, then time `num_runs` rounds in which each runs once.

    An engine that fails in its warm-up is skipped, and its timing has the error. The first engine,
    which the others are compared with, raises its failure.
    """
    errors = [None, *(warm_up_peer(engine, workload) for engine in engines[1:])]
    engines[0].run(workload.warm_up)
    runs: list[list[TimedRun]] = [[] for _ in engines]
    # in rounds, so that changes of clock speed and load affect all engines
    for number in range(num_runs):
        for engine, error, engine_runs in zip(engines, errors, runs, strict=True):
            if error is None:
                engine_runs.append(engine.run(workload))
        if on_run is not None:
            on_run(workload.name, number + 1, num_runs)
    return [summarize_runs(*timed) for timed in zip(engines, errors, runs, strict=True)]


def warm_up_peer(engine: BenchmarkEngine, workload: Workload) -> str | None:
    """Run the warm-up; the error when it fails."""
    try:
        engine.run(workload.warm_up)
    # Any error of a peer is a result: it replaces the figure.
    except Exception as error:
        return describe_error(error)
    return None


def summarize_runs(
    engine: BenchmarkEngine, error: str | None, runs: Sequence[TimedRun]
) -> EngineTiming:
    """The timing of an engine's runs."""
    return EngineTiming(
        engine=engine.engine,
        mode=engine.mode,
        version=engine.version,
        # All of them: the figure is their median, and the reader sees their spread.
        seconds=tuple(run.seconds for run in runs),
        tokens=runs[-1].tokens if runs else (),
        latencies=tuple(run.latency for run in runs if run.latency is not None),
        error=error,
    )


@frozen
class TokenDifference:
    """How the tokens of two engines differ.

    requests: how many have any other token
    first: the earliest output position at which one differs; None when all are equal
    """

    requests: int
    first: int | None


def find_difference(ours: OutputTokens, theirs: OutputTokens) -> TokenDifference:
    """Compare the tokens of two engines, request by request.

    raises: ValueError when the numbers of requests or of their tokens differ
    """
    first_positions = []
    for our_row, their_row in zip(ours, theirs, strict=True):
        differing = [
            position
            for position, (a, b) in enumerate(zip(our_row, their_row, strict=True))
            if a != b
        ]
        first_positions += differing[:1]
    return TokenDifference(len(first_positions), min(first_positions, default=None))
