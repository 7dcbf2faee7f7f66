"""What is under way in an engine: launched steps, and requests in the inbox."""

from __future__ import annotations

from attrs import frozen

from headstock.execution.abstract_executor import Pending
from headstock.scheduler import Plan, Request


@frozen(eq=False)
class InFlightStep:
    """A plan given to the device, and its result to come; None when its launch failed.

    failure: why the launch failed
    """

    plan: Plan
    pending: Pending | None
    failure: str = ""


@frozen(eq=False)
class QueuedRequest:
    """A request on its way to the scheduler.

    number: counts all that were ever queued
    arrival: in seconds of `time.monotonic`
    """

    request: Request
    stream_tokens: bool
    number: int
    arrival: float
