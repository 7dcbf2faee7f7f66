"""What is counted of long prompts beside streams."""

from __future__ import annotations

import pytest
from gpu.bounds import Load, summarize

from headstock_bench.latency import StreamTimes

LOAD = Load(long=8_000, interval=0.5, streams=2, count=2)


def times(arrival: float, *moments: float) -> StreamTimes:
    return StreamTimes(
        arrival=arrival,
        times=moments,
        token_ids=(1,) * len(moments),
        metrics=None,
        error=None,
    )


def test_gaps_count_from_the_first_long_prompt_to_the_last_ones_token() -> None:
    run = [
        times(0.0, 0.1, 0.2, 1.2, 1.25, 2.25, 2.26),
        times(0.0, 0.1, 0.15, 1.25, 2.15, 2.2, 2.3),
        times(1.0, 1.2),
        times(2.0, 2.2),
    ]
    found = summarize([run, run], LOAD)
    # Those that end at 1.2, 1.25 and, of the second stream, 1.25, 2.15 and 2.2; twice.
    assert found["gaps"] == 10
    assert (found["itl_p50_ms"], found["itl_p100_ms"]) == (900.0, 1100.0)
    assert (found["ttft_p50_ms"], found["ttft_p100_ms"]) == (200.0, 200.0)


def test_streams_that_end_too_soon_are_an_error() -> None:
    run = [times(0.0, 0.1, 2.1), times(0.0, 0.1, 2.3), times(1.0, 1.2), times(2.0, 2.2)]
    with pytest.raises(ValueError, match="more tokens"):
        summarize([run], LOAD)
