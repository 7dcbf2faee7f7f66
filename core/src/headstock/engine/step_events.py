"""From a step's sample to the scheduler's events."""

from __future__ import annotations

import logging

import numpy as np

from headstock.logs import log_event
from headstock.scheduler import Event, Failed, Plan, Sampled
from headstock.spi import Sample

LOG = logging.getLogger(__name__)


def make_step_events(plan: Plan, sample: Sample | None) -> list[Event]:
    """Make events of a step's result: sampled tokens of healthy rows, failure of the others.

    A step without a sample failed as a whole.
    """
    if sample is None:
        return [Failed(plan.rows, plan.admission_ids)]
    last_logits = plan.last_logits
    healthy = sample.healthy.numpy()[last_logits]
    events: list[Event] = []
    if not healthy.all():
        unhealthy = ~healthy
        LOG.error(log_event("logits are not finite", step=plan.number, rows=int(unhealthy.sum())))
        events.append(Failed(plan.rows[unhealthy], plan.admission_ids[unhealthy]))
    # Rows in the middle of their prompt are scored only for their health; their tokens are dropped.
    is_sampled = healthy & (plan.samples > 0)
    if is_sampled.any():
        tokens = sample.tokens.numpy()[last_logits[is_sampled]].astype(np.int32)
        events.append(Sampled(plan.rows[is_sampled], plan.admission_ids[is_sampled], None, tokens))
    return events
