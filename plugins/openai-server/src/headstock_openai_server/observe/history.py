"""The rates of the last two minutes, so that charts are full when the live view opens."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

from attrs import frozen

from headstock.engine import stats as engine_stats
from headstock_openai_server.api.answers import LiveHistory
from headstock_openai_server.observe.metrics import Histogram, ServerMetrics

HISTORY_SECONDS = 120


@frozen
class Sample:
    """Counts at a time: the engine's, and the number and sum of measured times."""

    time: float
    stats: engine_stats.EngineStats
    first_token: tuple[int, float]
    token_gap: tuple[int, float]


class History:
    """The samples of the last two minutes, one each second."""

    def __init__(self) -> None:
        # Rates lie between two samples.
        self.samples: deque[Sample] = deque(maxlen=HISTORY_SECONDS + 1)

    def note(self, now: float, stats: engine_stats.EngineStats, metrics: ServerMetrics) -> None:
        """Take a sample of the present counts."""
        first_token, token_gap = sum_up(metrics.first_token), sum_up(metrics.token_gap)
        self.samples.append(Sample(now, stats, first_token, token_gap))

    def describe(self, now: float) -> LiveHistory:
        """What the samples say, oldest first."""
        history = LiveHistory(
            ages=[],
            running=[],
            waiting=[],
            pool_usage=[],
            output_rate=[],
            step_rate=[],
            first_token=[],
            token_gap=[],
        )
        for before, sample in pairwise(self.samples):
            stats, seconds = sample.stats, sample.time - before.time
            total = stats.total_pages
            held = total - stats.free_pages - stats.cached_pages
            tokens = stats.output_tokens - before.stats.output_tokens
            steps = stats.executed_steps - before.stats.executed_steps
            history.ages.append(round(now - sample.time, 2))
            history.running.append(stats.running)
            history.waiting.append(stats.waiting)
            history.pool_usage.append(round(held / total, 4) if total else 0.0)
            history.output_rate.append(round(tokens / seconds, 2))
            history.step_rate.append(round(steps / seconds, 2))
            history.first_token.append(_average(before.first_token, sample.first_token))
            history.token_gap.append(_average(before.token_gap, sample.token_gap))
        return history


def sum_up(histogram: Histogram) -> tuple[int, float]:
    """The number of values and their sum."""
    return sum(histogram.counts), histogram.total


def _average(before: tuple[int, float], after: tuple[int, float]) -> float | None:
    count, total = after[0] - before[0], after[1] - before[1]
    return round(total / count, 6) if count else None
