"""What `/live` says: counts, and the latest snapshot of the engine."""

from __future__ import annotations

from headstock.engine import stats as engine_stats
from headstock_openai_server.api.answers import LiveLane, LiveNode, LiveTimes, LiveView
from headstock_openai_server.engine.messages import Lane, Snapshot, record_fields
from headstock_openai_server.observe.metrics import Histogram, ServerMetrics

NOTHING = Snapshot([], [], 0, 0, 0, [], [])
"""Before the engine has sent any."""


def make_live_view(
    stats: engine_stats.EngineStats, metrics: ServerMetrics, snapshot: Snapshot | None
) -> LiveView:
    """The answer to a page that watches."""
    shown = snapshot or NOTHING
    return LiveView(
        counts={name: int(count) for name, count in record_fields(stats).items()},
        times=LiveTimes(
            first_token=_sum_up(metrics.first_token), token_gap=_sum_up(metrics.token_gap)
        ),
        running=list(map(_make_lane, shown.running)),
        waiting=list(map(_make_lane, shown.waiting)),
        num_running=shown.num_running,
        num_waiting=shown.num_waiting,
        page_size=shown.page_size,
        page_maps=[each.decode("ascii") for each in shown.page_maps],
        tree=[
            LiveNode(parent=each.parent, pages=each.pages, requests=each.requests)
            for each in shown.tree
        ],
    )


def _sum_up(histogram: Histogram) -> tuple[int, float]:
    """How many values were counted, and their sum."""
    return sum(histogram.counts), histogram.total


def _make_lane(lane: Lane) -> LiveLane:
    return LiveLane(
        id=lane.id,
        prompt=lane.prompt,
        cached=lane.cached,
        computed=lane.computed,
        known=lane.known,
    )
