"""The functional core: scheduling as a pure function over frozen records. Knows numpy, never
torch.
"""

from headstock.schedule.columns import Column
from headstock.schedule.events import Aborted, Arrived, Cleared, Ended, Event, Failed, Sampled
from headstock.schedule.limits import Limits, refusal
from headstock.schedule.pages import num_held
from headstock.schedule.plan import Plan
from headstock.schedule.request import Entry, Request
from headstock.schedule.state import Accepted, State, initial
from headstock.schedule.step import step

__all__ = [
    "Aborted",
    "Accepted",
    "Arrived",
    "Cleared",
    "Column",
    "Ended",
    "Entry",
    "Event",
    "Failed",
    "Limits",
    "Plan",
    "Request",
    "Sampled",
    "State",
    "initial",
    "num_held",
    "refusal",
    "step",
]
