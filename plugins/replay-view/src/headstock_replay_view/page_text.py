"""The texts of the page: tiles, facts, and the table for a browser without scripts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

NO_VALUE = "-"
MAX_SLOWEST = 20
COLUMN_NAMES = ("request", "arrived", "first token after", "output tokens", "preempted", "ended")


@frozen(kw_only=True)
class FigureTile:
    """A figure: its name and value, a detail, and its definition."""

    name: str
    value: str
    detail: str
    meaning: str


def list_tiles(figures: Mapping[str, Any]) -> list[FigureTile]:
    """Return the tiles of the headline, the most important first."""
    f = figures
    ends = {
        "finished": f["finished"],
        "aborted": f["aborted"],
        "failed": f["failed"],
        "unfinished": f["unfinished"],
    }
    lost = {"never admitted again": f["never_back"]}
    return [
        FigureTile(
            name="Output tokens/s",
            value=_format_rate(f["output_rate"]),
            detail=f"{f['output_tokens']:,} tokens in {format_seconds(f['busy'])}; "
            f"{_format_rate(f['input_rate'])} prompt tokens/s",
            meaning="output tokens that became known, by the time of all steps that computed "
            "something.",
        ),
        FigureTile(
            name="Time to first token, p50\u00a0/\u00a0p99",
            value=_format_pair(f["ttft"]),
            detail="from the step that first saw the request",
            meaning="from the step that first saw a request to the step that read its first token.",
        ),
        FigureTile(
            name="Time between tokens, p50\u00a0/\u00a0p99",
            value=_format_pair(f["gap"]),
            detail="of all tokens after a request's first",
            meaning="from one step that read tokens of a request to the next such step, "
            "preemptions included.",
        ),
        FigureTile(
            name="Prefix hit rate",
            value=NO_VALUE if f["hit_rate"] is None else f"{f['hit_rate']:.1%}",
            detail=f"{f['cached_tokens']:,} prompt tokens from the index",
            meaning="share of prompt tokens that were in the prefix index when a request was "
            "first admitted.",
        ),
        FigureTile(
            name="Requests",
            value=f"{f['requests']:,}",
            detail=f"{_join_counts(ends)}; at most {f['running']:,} running, "
            f"{f['waiting']:,} waiting",
            meaning="requests that the scheduler got, by how they ended.",
        ),
        FigureTile(
            name="Preemptions",
            value=f"{f['preemptions']:,}",
            detail=f"of {f['preempted']:,} requests; {f['recomputed']:,} tokens computed again"
            + (f"; {_join_counts(lost)}" if f["never_back"] else ""),
            meaning="how often a request lost its row before it ended; what it had computed is "
            "computed again unless the prefix index kept it.",
        ),
        FigureTile(
            name="Steps",
            value=f"{f['steps']:,}",
            detail=f"p50 / p99 {_format_pair(f['step_ms'], 1000)}; {f['stalled']:,} stalls",
            meaning="scheduling steps; a stall is a request with a row and work to do that a "
            "step left out.",
        ),
        FigureTile(
            name="KV pages at the peak",
            value=f"{f['pages'] / f['all_pages']:.0%}",
            detail=f"{f['pages']:,} of {f['all_pages']:,} held by requests",
            meaning="the most pages that requests held at once; pages that only the prefix index "
            "keeps do not count.",
        ),
    ]


def list_facts(data: Mapping[str, Any]) -> list[str]:
    """Return the parts and limits of the engine, as short texts."""
    figures, limits = data["headline"], data["limits"]
    return [
        f"{figures['steps']:,} steps in {format_seconds(figures['span'])}",
        *(f"{kind} {name}" for kind, name in data["parts"].items()),
        *(f"{value:,} {name}" for name, value in limits.items()),
        f"headstock {data['headstock']}",
    ]


def list_slowest(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table of the requests that waited longest for a first token.

    Requests without one come first.
    """
    lanes, at, total = data["lanes"], [], 0
    for step in data["series"]["at"]:
        total += step
        at.append(total / 1e6)

    def wait_seconds(lane: int) -> float:
        first = lanes["first"][lane]
        # A request that never got a token waited longest of all.
        return float("inf") if first < 0 else at[first] - at[lanes["arrived"][lane]]

    rows = [
        (
            lanes["ids"][lane],
            format_seconds(at[lanes["arrived"][lane]]),
            NO_VALUE if lanes["first"][lane] < 0 else format_seconds(wait_seconds(lane)),
            f"{lanes['output'][lane]:,}",
            f"{lanes['preemptions'][lane]:,}",
            lanes["reasons"][lane] or "not yet",
        )
        for lane in sorted(range(len(lanes["ids"])), key=wait_seconds, reverse=True)[:MAX_SLOWEST]
    ]
    return {"names": COLUMN_NAMES, "rows": rows}


def format_seconds(value: float) -> str:
    """Return a time with three digits, in s, ms or µs."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= 0.9995 * size:
            return f"{format_number(value / size)} {unit}"
    return f"{format_number(value * 1e6)} µs" if value else "0 s"


def format_number(value: float) -> str:
    """Return a number with three digits, or all digits before its point."""
    return (
        f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
    )


def _format_pair(pair: tuple[float, float] | None, per_second: float = 1) -> str:
    """Return two percentiles as text."""
    return (
        NO_VALUE
        if pair is None
        else " / ".join(format_seconds(value / per_second) for value in pair)
    )


def _format_rate(value: float | None) -> str:
    """Return a rate as text."""
    return NO_VALUE if value is None else format_number(value)


def _join_counts(counts: Mapping[str, int]) -> str:
    """Return the nonzero counts as text, "none" if all are zero."""
    return ", ".join(f"{count:,} {name}" for name, count in counts.items() if count) or "none"
