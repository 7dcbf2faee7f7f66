"""The most important figures for tuning an engine."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from attrs import frozen

from headstock.spi.arrays import Ints
from headstock_replay_view.lanes import GONE, PREEMPTED, Lanes


@frozen(kw_only=True)
class Headline:
    """The figures of a run; None if there is nothing to measure.

    - `span`: seconds from the first planned step to the last
    - `busy`: the same without the time after empty steps; rates are per busy second
    - `hit_rate`: share of prompt tokens found in the prefix index at the first admission
    - `ttft`, `gap` (between a request's tokens): percentiles 50 and 99, in seconds
    - `pages`: the maximum number of pages held by rows, of `all_pages`
    - `busiest`: the step with the most computed tokens and, among equals, the most requests
    - `slow_from`: percentile 99 in milliseconds; below 100 steps, the second longest
    - `slow`: steps longer than that; `slowest`: the longest step
    """

    steps: int
    span: float
    busy: float
    requests: int
    finished: int
    aborted: int
    failed: int
    unfinished: int
    output_tokens: int
    prompt_tokens: int
    output_rate: float | None
    input_rate: float | None
    ttft: tuple[float, float] | None
    gap: tuple[float, float] | None
    hit_rate: float | None
    cached_tokens: int
    preemptions: int
    preempted: int
    never_back: int
    recomputed: int
    stalled: int
    running: int
    waiting: int
    pages: int
    all_pages: int
    busiest: int
    step_ms: tuple[float, float] | None
    slow_from: float | None
    slow: tuple[int, ...]
    slowest: int


def make_headline(series: Mapping[str, Ints], lanes: Lanes, all_pages: int) -> Headline:
    """Return the figures of a run.   series: by name, an entry per step; "at" in ns"""
    count = len(series["at"])
    table = {name: np.array(values, np.int64) for name, values in lanes.list_numbers().items()}
    admitted, ended = table["admitted"] >= 0, table["ended"] >= 0
    reasons = np.array(lanes.reasons, object)
    failed, finished = reasons == "error", np.isin(reasons, ("stop", "length"))
    tokens = series["prefill"] + series["decode"]
    lengths = _measure_steps(series["at"], tokens)
    ran = lengths[lengths >= 0]
    busy, output = float(ran.sum()) / 1e9, int(table["output"].sum())
    looked_up = int(table["prompt"][admitted].sum())
    cached = int(table["cached"].sum())
    top = find_axis_end(ran)
    return Headline(
        steps=count,
        span=float(series["at"][-1] - series["at"][0]) / 1e9 if count else 0.0,
        busy=busy,
        requests=len(lanes.ids),
        finished=int(finished.sum()),
        failed=int(failed.sum()),
        aborted=int((ended & ~finished & ~failed).sum()),
        unfinished=int((~ended).sum()),
        output_tokens=output,
        prompt_tokens=int(series["prefill"].sum()),
        output_rate=output / busy if busy else None,
        input_rate=float(series["prefill"].sum()) / busy if busy else None,
        ttft=_percentile_pair(np.array(sorted(lanes.waits), np.int64), 1e9),
        gap=_weighted_percentile_pair(lanes.gaps),
        hit_rate=cached / looked_up if looked_up else None,
        cached_tokens=cached,
        preemptions=int(table["preemptions"].sum()),
        preempted=int((table["preemptions"] > 0).sum()),
        never_back=sum(_is_away(steps) for steps in lanes.segments),
        recomputed=int(table["recomputed"].sum()),
        stalled=int(table["stalled"].sum()),
        running=int(series["running"].max(initial=0)),
        waiting=int(series["waiting"].max(initial=0)),
        pages=int((series["live"] + series["shared"]).max(initial=0)),
        all_pages=all_pages,
        # The page opens here: the last step is often an empty one.
        busiest=int(np.lexsort((-series["running"], -tokens))[0]) if count else 0,
        step_ms=_percentile_pair(ran, 1e6),
        slow_from=None if top is None else top / 1e6,
        slow=() if top is None else tuple(np.flatnonzero(lengths > top).tolist()),
        slowest=int(lengths.argmax()) if len(ran) else 0,
    )


def _is_away(segments: list[tuple[int, int]]) -> bool:
    """Whether a request was preempted and never admitted again."""
    phases = [phase for _, phase in segments if phase != GONE]
    return phases[-1] == PREEMPTED


def _measure_steps(at: Ints, tokens: Ints) -> Ints:
    """Return nanoseconds from each step to the next; -1 for the last and empty steps."""
    lengths = np.append(np.diff(at), -1)[: len(at)]
    return np.where(tokens > 0, lengths, -1)


def percentile(values: Ints, share: float) -> int | None:
    """Return the nearest-rank percentile; None without values."""
    if not len(values):
        return None
    rank = max(math.ceil(len(values) * share / 100), 1)
    return int(np.partition(values, rank - 1)[rank - 1])


def find_axis_end(values: Ints) -> int | None:
    """Return percentile 99; below 100 values, the second largest."""
    # Percentile 99 of few values is the largest, and one outlier would flatten the whole chart.
    if 2 <= len(values) < 100:
        return int(np.sort(values)[-2])
    return percentile(values, 99)


def _percentile_pair(values: Ints, unit: float) -> tuple[float, float] | None:
    """Return percentiles 50 and 99 in units of `unit`."""
    low, high = percentile(values, 50), percentile(values, 99)
    return None if low is None or high is None else (low / unit, high / unit)


def _weighted_percentile_pair(counts: Mapping[int, int]) -> tuple[float, float] | None:
    """Return percentiles 50 and 99, in seconds, of nanoseconds and their frequencies."""
    if not counts:
        return None
    values = np.array(sorted(counts), np.int64)
    ranks = np.cumsum([counts[value] for value in values.tolist()])
    positions = [max(math.ceil(int(ranks[-1]) * share / 100), 1) for share in (50, 99)]
    low, high = values[np.searchsorted(ranks, positions)].tolist()
    return low / 1e9, high / 1e9
