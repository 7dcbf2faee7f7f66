"""From a step's sample to the scheduler's events."""

from __future__ import annotations

import numpy as np

from headstock.engine.drafting import Drafting, MadeDrafts, accept_drafts, read_verified
from headstock.execution.abstract_executor import Pending
from headstock.execution.pooling import find_healthy_rows
from headstock.scheduler import Event, Failed, Plan, Pooled, Sampled
from headstock.spi import Sample


def make_step_events(
    plan: Plan,
    sample: Sample | None,
    drafting: Drafting | None = None,
    in_flight: Plan | None = None,
    pending: Pending | None = None,
) -> list[Event]:
    """Make events of a step's result: sampled tokens of healthy rows, failure of the others.

    A step without a sample failed as a whole.
    drafting: where a proposer is asked what may follow the tokens
    in_flight: the plan that runs now
    pending: the step, which may make drafts behind its sample
    raises: PluginBroken by the proposer
    """
    if sample is None:
        return [Failed(plan.rows, plan.admission_ids)]
    last_logits = plan.last_logits
    healthy = find_healthy_rows(plan, sample)
    events: list[Event] = []
    if not healthy.all():
        unhealthy = ~healthy
        events.append(Failed(plan.rows[unhealthy], plan.admission_ids[unhealthy]))
    if len(plan.pooling):
        ends = healthy & (plan.pooling == 2)
        if ends.any():
            events.append(Pooled(plan.rows[ends], plan.admission_ids[ends]))
    # Rows in the middle of their prompt are scored only for their health; their tokens are dropped.
    is_sampled = healthy & (plan.samples > 0)
    if is_sampled.any() and drafting is not None:
        which = is_sampled.nonzero()[0]
        plan = read_verified(plan, last_logits, sample)
        rows = accept_drafts(plan, last_logits, which, sample.tokens.numpy())
        made = None if pending is None or not pending.has_drafts else MadeDrafts(pending, which)
        events.append(drafting.make_event(rows, in_flight, made))
    elif is_sampled.any():
        tokens = sample.tokens.numpy()[last_logits[is_sampled]].astype(np.int32)
        events.append(Sampled(plan.rows[is_sampled], plan.admission_ids[is_sampled], None, tokens))
    return events
