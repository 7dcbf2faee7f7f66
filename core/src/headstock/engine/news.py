"""What the scheduler is told of a step that ran."""

from __future__ import annotations

import logging

import numpy as np

from headstock.engine.inline import Outcome
from headstock.logs import event
from headstock.schedule import Event, Failed, Plan, Sampled

LOG = logging.getLogger(__name__)


def news(plan: Plan, outcome: Outcome | None) -> list[Event]:
    """Tokens of healthy rows, failure of the others; a step without an outcome failed as a
    whole.
    """
    if outcome is None:
        return [Failed(plan.rows, plan.orders)]
    healthy = outcome.healthy[outcome.last_logits]
    events: list[Event] = []
    if not healthy.all():
        sick = ~healthy
        LOG.error(event("logits are not finite", step=plan.number, rows=int(sick.sum())))
        events.append(Failed(plan.rows[sick], plan.orders[sick]))
    told = healthy & (plan.samples > 0)
    if told.any():
        tokens = outcome.tokens[outcome.last_logits[told]].astype(np.int32)
        events.append(Sampled(plan.rows[told], plan.orders[told], None, tokens))
    return events
