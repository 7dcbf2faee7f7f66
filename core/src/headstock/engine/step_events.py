"""From a step's sample to the scheduler's events."""

from __future__ import annotations

import logging

import numpy as np

from headstock.engine.drafting import Drafting, accept_drafts
from headstock.logs import log_event
from headstock.scheduler import Event, Failed, Plan, Sampled
from headstock.spi import Sample

LOG = logging.getLogger(__name__)


def make_step_events(
    plan: Plan,
    sample: Sample | None,
    drafting: Drafting | None = None,
    in_flight: Plan | None = None,
) -> list[Event]:
    """Make events of a step's result: sampled tokens of healthy rows, failure of the others.

    A step without a sample failed as a whole.
    drafting: where a proposer is asked what may follow the tokens
    in_flight: the plan that runs now
    raises: PluginBroken by the proposer
    """
    if sample is None:
        return [Failed(plan.rows, plan.admission_ids)]
    last_logits = plan.last_logits
    healthy = sample.healthy.numpy()
    # A draft that is rejected tells as much of a row's soundness as any other token.
    healthy = (
        np.logical_and.reduceat(healthy, last_logits + 1 - plan.num_logits)
        if len(plan.num_drafts)
        else healthy[last_logits]
    )
    events: list[Event] = []
    if not healthy.all():
        unhealthy = ~healthy
        LOG.error(log_event("logits are not finite", step=plan.number, rows=int(unhealthy.sum())))
        events.append(Failed(plan.rows[unhealthy], plan.admission_ids[unhealthy]))
    # Rows in the middle of their prompt are scored only for their health; their tokens are dropped.
    is_sampled = healthy & (plan.samples > 0)
    if is_sampled.any() and drafting is not None:
        rows = accept_drafts(plan, is_sampled.nonzero()[0], sample.tokens.numpy())
        events.append(drafting.make_event(rows, in_flight))
    elif is_sampled.any():
        tokens = sample.tokens.numpy()[last_logits[is_sampled]].astype(np.int32)
        events.append(Sampled(plan.rows[is_sampled], plan.admission_ids[is_sampled], None, tokens))
    return events
