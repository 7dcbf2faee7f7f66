"""Scheduling as a pure function over frozen records; imports numpy, never torch."""

from headstock.scheduler.events import (
    Aborted,
    Arrived,
    Cleared,
    Ended,
    Event,
    Failed,
    Paced,
    Sampled,
)
from headstock.scheduler.limits import Limits, find_refusal
from headstock.scheduler.page_pool import count_held_pages
from headstock.scheduler.plan import Plan
from headstock.scheduler.request import Request, RequestState
from headstock.scheduler.row_counters import RowCounter
from headstock.scheduler.state import State, initial_state
from headstock.scheduler.step import step

__all__ = [
    "Aborted",
    "Arrived",
    "Cleared",
    "Ended",
    "Event",
    "Failed",
    "Limits",
    "Paced",
    "Plan",
    "Request",
    "RequestState",
    "RowCounter",
    "Sampled",
    "State",
    "count_held_pages",
    "find_refusal",
    "initial_state",
    "step",
]
