"""Engines that verify drafts, count waits or tell users apart in a wrong way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attrs import evolve

from headstock.engine import step_events
from headstock.engine.tracked_request import DraftHistory
from headstock.execution.sampling_inputs import SamplingTable
from headstock.scheduler import Clock, RowCounter, apply, selection
from headstock.scheduler.name_table import NameTable
from headstock.scheduler.request import Request, RequestState
from headstock.spi import Step

from .broken import DIFFERS, Mutant, around, step

UNLIKE = rf"{DIFFERS}|said .* and not|wrong tokens|^AssertionError"


def all_right(
    accept_drafts: Any, plan: Any, last_logits: Any, which: Any, samples: np.ndarray
) -> Any:
    """Drafts are said without a look at what was sampled before them."""
    samples, start = samples.copy(), 0
    for last, count in zip(last_logits.tolist(), plan.num_drafts.tolist(), strict=False):
        samples[last - count : last] = plan.drafts[start : start + count]
        start += count
    return accept_drafts(plan, last_logits, which, samples)


def beside_rows_that_failed(
    accept_drafts: Any, plan: Any, last_logits: Any, which: Any, samples: np.ndarray
) -> Any:
    """A row's drafts are looked up as if the rows that failed had none."""
    drafts, counts = plan.drafts.copy(), plan.num_drafts
    if len(counts):
        starts = (np.cumsum(counts) - counts)[which]
        taken = np.cumsum(counts[which]) - counts[which]
        for start, at, count in zip(starts, taken, counts[which], strict=True):
            drafts[start : start + count] = plan.drafts[at : at + count]
    return accept_drafts(evolve(plan, drafts=drafts), last_logits, which, samples)


def by_the_first_accepted(apply_samples: Any, state: Any, event: Any) -> None:
    """Whether min_tokens are out is judged at a row's first accepted token, for all of them."""
    counters, live = state.row_counters, event.rows
    ids = counters[RowCounter.ADMISSION_ID, live].copy()
    least = counters[RowCounter.MIN_LEN, live].copy()
    is_early = counters[RowCounter.NUM_KNOWN, live] + 1 < least
    counters[RowCounter.MIN_LEN, live[is_early]] = np.iinfo(np.int32).max
    apply_samples(state, event)
    same = counters[RowCounter.ADMISSION_ID, live] == ids
    counters[RowCounter.MIN_LEN, live[same]] = least[same]


def without_going_back(sync_counters: Any, counters: np.ndarray, rows: Any, known: Any) -> None:
    """What was computed for rejected drafts counts as computed."""
    computed = counters[RowCounter.NUM_COMPUTED].copy()
    sync_counters(counters, rows, known)
    counters[RowCounter.NUM_COMPUTED] = computed


def holding(value: int) -> Any:
    """All rows are held back for drafts, or none is."""

    def apply_samples_held(apply_samples: Any, state: Any, event: Any) -> None:
        apply_samples(state, evolve(event, hold=np.full_like(event.hold, value)))

    return apply_samples_held


def noise_of_the_first(make: Any, self: Any, rows: Any, positions: Any, *more: Any) -> Any:
    """All positions of a row are sampled with the noise of its first one."""
    firsts = {row: int(positions[rows == row].min()) for row in set(rows.tolist())}
    places = np.array([firsts[row] for row in rows.tolist()], positions.dtype)
    return make(self, rows, places, *more)


def stored_late(list_stored: Any, self: Any) -> Any:
    """The samples of a row that verifies land one place behind their own."""
    rows, positions, at = list_stored(self)
    return rows, positions + (0 if self.num_drafts is None else 1), at


def before_the_clock(apply_arrival: Any, state: Any, request: Any) -> None:
    """A request arrives a moment before the step's time."""
    state.milliseconds, now = state.milliseconds - 1, state.milliseconds
    apply_arrival(state, request)
    state.milliseconds = now


def stands_still(apply_event: Any, state: Any, event: Any) -> None:
    """The clock stands still."""
    if not isinstance(event, Clock):
        apply_event(state, event)


def waits_anew(requeued: Any, self: RequestState, tokens: Any) -> RequestState:
    """A request that is preempted begins to wait again."""
    again: RequestState = requeued(self, tokens)
    return evolve(again, arrived_at=again.arrived_at + 100)


def adapters_together(patch: pytest.MonkeyPatch) -> None:
    """The namespace of keys and values does not know the adapter."""
    own = property(lambda self: self.namespace, lambda self, value: None)
    patch.setattr(Request, "prefix_namespace", own)


DRAFTED = {
    "drafts said unseen": Mutant(around(step_events, "accept_drafts", all_right), UNLIKE),
    "rejected drafts stay": Mutant(
        around(apply, "_sync_counters", without_going_back), rf"past its end|{UNLIKE}"
    ),
    "nobody is held back": Mutant(around(apply, "apply_samples", holding(0)), DIFFERS),
    "all are held back": Mutant(
        around(apply, "apply_samples", holding(1)), "a row without drafts lost its overlap"
    ),
    "drafts counted without failed rows": Mutant(
        around(step_events, "accept_drafts", beside_rows_that_failed), UNLIKE
    ),
    "min_tokens judged once a step": Mutant(
        around(apply, "apply_samples", by_the_first_accepted), UNLIKE
    ),
    "drafts preempt": Mutant(
        around(selection, "_leave_out_drafts", lambda leave_out, state, counts: counts), UNLIKE
    ),
    "drafts taken for prompts": Mutant(
        around(selection, "count_drafts", lambda count, counters: count(counters) * 0), DIFFERS
    ),
    "misses cost nothing": Mutant(
        around(DraftHistory, "count_hits", lambda count_hits, self, hits: None), UNLIKE
    ),
    "noise of the first draft": Mutant(
        around(SamplingTable, "make_sampling", noise_of_the_first), UNLIKE
    ),
    "samples of drafts kept late": Mutant(around(Step, "list_stored", stored_late), UNLIKE),
    "arrived before the clock": Mutant(around(apply, "_apply_arrival", before_the_clock), DIFFERS),
    "the clock stands still": Mutant(around(step, "apply_event", stands_still), UNLIKE),
    "waits begin anew": Mutant(around(RequestState, "requeued", waits_anew), UNLIKE),
    "names never forgotten": Mutant(
        around(NameTable, "drop", lambda drop, self, name: None), rf"miscounted|{DIFFERS}"
    ),
    "adapters mixed": Mutant(adapters_together, "a prefix of another adapter was taken"),
}
"""What is broken -> how, and in which words it is noticed."""
