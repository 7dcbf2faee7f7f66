"""The data of `/live`: counts and the engine's latest snapshot."""

from __future__ import annotations

from headstock.engine import stats as engine_stats
from headstock_openai_server.api.answers import LiveHistory, LiveLane, LiveNode, LiveTimes, LiveView
from headstock_openai_server.engine.messages import Lane, Snapshot, record_fields
from headstock_openai_server.observe.history import sum_up
from headstock_openai_server.observe.metrics import ServerMetrics

NOTHING = Snapshot([], [], 0, 0, 0, [], [])
"""The snapshot before the engine has sent one."""


def make_live_view(
    stats: engine_stats.EngineStats,
    metrics: ServerMetrics,
    history: LiveHistory,
    snapshot: Snapshot | None,
) -> LiveView:
    """The answer of `/live`."""
    shown = snapshot or NOTHING
    return LiveView(
        counts={name: int(count) for name, count in record_fields(stats).items()},
        times=LiveTimes(
            first_token=sum_up(metrics.first_token), token_gap=sum_up(metrics.token_gap)
        ),
        history=history,
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


def _make_lane(lane: Lane) -> LiveLane:
    return LiveLane(
        id=lane.id,
        prompt=lane.prompt,
        cached=lane.cached,
        computed=lane.computed,
        known=lane.known,
    )
