"""A launched step, and what came of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from attrs import field, frozen

from headstock.execution.abstract_executor import Pending
from headstock.logs import log_event
from headstock.scheduler import Event, Failed, Plan
from headstock.spi import Sample

LOG = logging.getLogger(__name__)

NOT_FINITE = (
    "the logits of this request are not finite; debug_invariants (--debug-invariants) says "
    "which layer was the first, outside of graphs"
)


@frozen(eq=False)
class InFlightStep:
    """A plan given to the device, and what came of it.

    pending: its result to come; None when its launch failed
    sample: once the step is over; None for one that failed
    failure: why it failed
    reasons: by row, what is wrong with it, of rows that failed alone
    """

    plan: Plan
    pending: Pending | None
    sample: Sample | None = None
    failure: str = ""
    reasons: Mapping[int, str] = field(factory=dict)

    def explain(
        self, events: Sequence[Event], explain_unfollowed: Callable[[int], str]
    ) -> Mapping[int, str]:
        """Explain by admission id why the events' requests failed; log rows that failed alone.

        explain_unfollowed: says why a grammar allowed no token, for an admission id
        """
        errors = {
            admission_id: self.failure
            or explain_unfollowed(admission_id)
            or self.reasons.get(row, NOT_FINITE)
            for event in events
            if isinstance(event, Failed)
            for row, admission_id in zip(
                event.rows.tolist(), event.admission_ids.tolist(), strict=True
            )
        }
        if errors and not self.failure:
            why = next(iter(errors.values()))
            LOG.error(
                log_event("rows failed", step=self.plan.number, rows=len(errors), because=why)
            )
        return errors
