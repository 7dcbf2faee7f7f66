"""How many pages requests hold or wait for, for `--on-pressure reject`."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np

from headstock.engine.output_tracker import OutputTracker
from headstock.engine.tracked_request import TrackedRequest
from headstock.scheduler import Limits, RowCounter, State
from headstock.spi.arrays import Ints


class PageDemand:
    """The pages that requests hold or wait for, counted once a step on the engine's thread.

    counted: pages by KV group, and the number of the last queued request that they include. One
        tuple, so that another thread reads both of the same step.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.counted = np.zeros(len(limits.groups), np.int64), 0

    def count(
        self, state: State, tracker: OutputTracker, arrived: Iterable[TrackedRequest]
    ) -> None:
        """Count the pages after a step in which these requests arrived."""
        held = np.array([np.count_nonzero(refs) for refs in state.refs])
        num_pages = tracker.unadmitted_pages + held + self._count_missing(state)
        # Only preempted requests wait with more than their prompt; the walk over the queue is left
        # out while there are none.
        if len(state.waiting) > tracker.num_unadmitted:
            for entry in state.waiting:
                if entry.preemptions:
                    num_pages = num_pages + self.limits.pages_by_group(len(entry.tokens))
        numbers = (queued.number for queued in arrived)
        self.counted = num_pages, max(numbers, default=self.counted[1])

    def _count_missing(self, state: State) -> Ints:
        """Count the pages that prompts lack which are cut into chunks, [groups] int64."""
        counters = state.row_counters
        known = counters[RowCounter.NUM_KNOWN]
        num_pages = np.zeros(len(self.limits.groups), np.int64)
        for row in np.flatnonzero(counters[RowCounter.NUM_COMPUTED] < known - 1).tolist():
            lacked = self.limits.pages_by_group(int(known[row])) - (
                state.spans[:, row] - state.first_pages[:, row]
            )
            num_pages += lacked.clip(0)
        return num_pages

    def find_pressure(self, queued: Collection[TrackedRequest]) -> float:
        """Return the share of pages in demand, in the KV group where it is largest.

        queued: read before this is called, so that none is missed; a request in both is known by
            its number
        """
        pages, counted = self.counted
        for entry in queued:
            if entry.number > counted:
                pages = pages + entry.prompt_pages
        return min(self.limits.largest_share(pages), 1.0)
