"""Alternate engines on the same workload, and compare their tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Protocol

from attrs import field, frozen

from headstock.errors import describe_error
from headstock_bench.latency import Latency
from headstock_bench.workloads import Workload

OutputTokens = tuple[tuple[int, ...], ...]
"""The output tokens of each request, in order, cut to the requested number."""


@frozen
class TimedRun:
    """One run of a workload.

    seconds: wall time from the submission of the first request to the last token
    latency: None if all requests are submitted at once
    """

    seconds: float
    tokens: OutputTokens = field(repr=False)
    latency: Latency | None = None


class BenchmarkEngine(Protocol):
    """A benchmarked engine; `mode` names one of several ways to run it."""

    engine: str
    mode: str
    version: str

    def run(self, workload: Workload) -> TimedRun:
        """Run the workload once.

        Before the clock starts, it resets caches that would make a second run faster.
        """


@frozen(kw_only=True)
class EngineTiming:
    """The timed runs of one engine.

    seconds: one per run    tokens: of the last run
    latencies: one per run, if requests arrive one by one
    error: why the engine could not run the workload; there are then no runs
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
"""Called with a workload's name, the number of its finished timed runs, and their total."""


def run_in_turns(
    engines: Sequence[BenchmarkEngine],
    workload: Workload,
    num_runs: int,
    on_run: RunCallback | None = None,
) -> list[EngineTiming]:
    """Warm up each engine, then time `num_runs` rounds in which each runs once.

    An engine that fails in its warm-up is skipped, and its timing has the error. The first engine,
    to which the others are compared, raises its failure.
    """
    errors = [None, *(warm_up_peer(engine, workload) for engine in engines[1:])]
    engines[0].run(workload.warm_up)
    runs: list[list[TimedRun]] = [[] for _ in engines]
    # In rounds, so that changes of clock speed and load affect all engines alike, and every second
    # one in the other order, since one engine's run may slow the next one's.
    turns = list(zip(engines, errors, runs, strict=True))
    for number in range(num_runs):
        for engine, error, engine_runs in turns[:: -1 if number % 2 else 1]:
            if error is None:
                engine_runs.append(engine.run(workload))
        if on_run is not None:
            on_run(workload.name, number + 1, num_runs)
    return [summarize_runs(*timed) for timed in zip(engines, errors, runs, strict=True)]


def warm_up_peer(engine: BenchmarkEngine, workload: Workload) -> str | None:
    """Run the warm-up; return its error, if any."""
    try:
        engine.run(workload.warm_up)
    # An error of a peer is a result and replaces the figure.
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
        # All runs: the figure is their median, and readers need their spread.
        seconds=tuple(run.seconds for run in runs),
        tokens=runs[-1].tokens if runs else (),
        latencies=tuple(run.latency for run in runs if run.latency is not None),
        error=error,
    )


@frozen
class TokenDifference:
    """How the tokens of two engines differ.

    requests: how many have a different token
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
