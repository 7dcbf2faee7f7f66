"""Latencies of streams, as their caller sees them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from attrs import frozen

from headstock import RequestMetrics

Floats = npt.NDArray[np.float64]

PERCENTILES = ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms")
"""Fields of `Latency`."""


@frozen(kw_only=True)
class StreamTimes:
    """One request as its caller saw it; all times are in seconds of one clock.

    arrival: when it was due, not when it was sent    times: of each piece that held tokens
    metrics: None when nothing came    error: why it failed, None when it finished
    """

    arrival: float
    times: tuple[float, ...]
    token_ids: tuple[int, ...]
    metrics: RequestMetrics | None = None
    error: str | None = None


@frozen(kw_only=True)
class Latency:
    """Latencies of one run in milliseconds, percentiles over all requests or all gaps.

    ttft: from a request's arrival to its first token
    itl: between two pieces of one stream, each a token or several that came at once; None when no
        stream has two
    num_tokens: what was generated    error: the first of a request that failed
    """

    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float | None
    itl_p99_ms: float | None
    finished: int
    num_tokens: int
    error: str | None = None


def summarize_streams(streams: Sequence[StreamTimes]) -> Latency:
    """The latencies of a run.   raises: ValueError when no request has a first token"""
    first = [stream.times[0] - stream.arrival for stream in streams if stream.times]
    gaps = np.concatenate([np.diff(stream.times) for stream in streams])
    if not first:
        raise ValueError("no request has a first token")
    errors = [stream.error for stream in streams if stream.error is not None]
    return Latency(
        ttft_p50_ms=_percentile_ms(first, 50),
        ttft_p99_ms=_percentile_ms(first, 99),
        itl_p50_ms=_percentile_ms(gaps, 50) if len(gaps) else None,
        itl_p99_ms=_percentile_ms(gaps, 99) if len(gaps) else None,
        finished=len(streams) - len(errors),
        num_tokens=sum(len(stream.token_ids) for stream in streams),
        error=errors[0] if errors else None,
    )


def collect_percentiles(runs: Sequence[Latency]) -> dict[str, list[float]]:
    """Name of each percentile -> its values in milliseconds, one a run; runs without gaps have
    none.
    """
    values = {name: [getattr(run, name) for run in runs] for name in PERCENTILES}
    return {name: [value for value in each if value is not None] for name, each in values.items()}


def _percentile_ms(seconds: Sequence[float] | Floats, percent: float) -> float:
    return float(np.percentile(seconds, percent)) * 1e3
