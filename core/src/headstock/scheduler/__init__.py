"""Scheduling: the same events give the same plans; imports numpy, never torch."""

from headstock.scheduler.events import (
    Aborted,
    Arrived,
    Cleared,
    Clock,
    Ended,
    Event,
    Failed,
    Outcome,
    Paced,
    Pooled,
    Sampled,
)
from headstock.scheduler.limits import Limits, find_refusal
from headstock.scheduler.page_pool import count_held_pages
from headstock.scheduler.plan import Plan
from headstock.scheduler.request import PoolingKind, Request, RequestState
from headstock.scheduler.row_counters import RowCounter
from headstock.scheduler.state import State, initial_state
from headstock.scheduler.step import apply_events, begin_step, finish_step, step

__all__ = [
    "Aborted",
    "Arrived",
    "Cleared",
    "Clock",
    "Ended",
    "Event",
    "Failed",
    "Limits",
    "Outcome",
    "Paced",
    "Plan",
    "Pooled",
    "PoolingKind",
    "Request",
    "RequestState",
    "RowCounter",
    "Sampled",
    "State",
    "apply_events",
    "begin_step",
    "count_held_pages",
    "find_refusal",
    "finish_step",
    "initial_state",
    "step",
]
