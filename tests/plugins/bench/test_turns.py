"""Engines run in turns, and a peer that cannot run has its error in the result."""

from __future__ import annotations

import pytest
from attrs import define, field

from headstock_bench.result import make_peer_result
from headstock_bench.turns import (
    EngineTiming,
    TimedRun,
    TokenDifference,
    find_difference,
    run_in_turns,
)
from headstock_bench.workloads import Workload

WORK = Workload(name="work", prompts=((1, 2), (3,)), outputs=(2, 1), temperature=0.0)


@define
class Scripted:
    """An engine whose runs last as long as `seconds` says; `log` has the mode of each run."""

    mode: str
    seconds: list[float]
    log: list[str]
    engine: str = "scripted"
    version: str = "1"
    fails: Exception | None = None
    tokens: tuple[tuple[int, ...], ...] = field(default=((7, 8), (9,)))

    def run(self, workload: Workload) -> TimedRun:
        assert workload is WORK
        if self.fails is not None:
            raise self.fails
        self.log.append(self.mode)
        return TimedRun(self.seconds.pop(0), self.tokens)


def test_engines_warm_up_and_then_run_in_turns() -> None:
    log: list[str] = []
    ours, theirs = (
        Scripted("ours", [9.0, 1.0, 3.0, 2.0], log),
        Scripted("theirs", [9.0, 5.0, 4.0, 8.0], log),
    )
    timings = run_in_turns([ours, theirs], WORK, 3)
    assert [sorted(log[:2]), log[2:]] == [
        ["ours", "theirs"],
        ["ours", "theirs", "theirs", "ours", "ours", "theirs"],
    ]
    assert [timing.seconds for timing in timings] == [(1.0, 3.0, 2.0), (5.0, 4.0, 8.0)]
    peer = make_peer_result(*timings, WORK, find_difference(ours.tokens, theirs.tokens))
    assert peer.ratios == (5.0, 1.333, 4.0)
    assert (peer.ratio, peer.median_s, peer.out_tok_s, peer.difference) == (
        2.5,
        5.0,
        0.6,
        TokenDifference(0, None),
    )


def test_a_peer_that_cannot_run_has_an_error_in_place_of_a_result() -> None:
    ours = Scripted("ours", [9.0, 1.0], [])
    timings = run_in_turns(
        [ours, Scripted("theirs", [], [], fails=RuntimeError("no kernel"))], WORK, 1
    )
    peer = make_peer_result(*timings, WORK, None)
    assert (peer.error, peer.ratio, peer.runs_s) == ("RuntimeError: no kernel", None, ())


def test_an_engine_that_cannot_run_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no kernel"):
        run_in_turns([Scripted("ours", [], [], fails=RuntimeError("no kernel"))], WORK, 1)


def test_differences_are_counted_by_request_and_found_at_the_earliest_position() -> None:
    assert find_difference(((1, 2, 3), (4,)), ((1, 2, 3), (4,))) == TokenDifference(0, None)
    assert find_difference(((1, 2, 3), (4, 5), (6,)), ((1, 0, 0), (4, 0), (6,))) == TokenDifference(
        2, 1
    )
    with pytest.raises(ValueError, match="shorter"):
        find_difference(((1, 2),), ((1,),))


def test_the_median_is_of_the_runs() -> None:
    assert EngineTiming(engine="e", mode="m", version="1", seconds=(3.0, 1.0, 2.0)).median == 2.0
