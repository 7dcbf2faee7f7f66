"""The activity of each request in every step, derived from the replayed states."""

from __future__ import annotations

from collections import Counter

import numpy as np
from attrs import define, field

from headstock.record import RecordedStep
from headstock.scheduler import Arrived, Limits, Plan, Request, RowCounter, State
from headstock.spi.arrays import Ints

QUEUED, PREFILL, DECODE, STALLED, PREEMPTED, GONE = range(6)
"""The activity of a request in a step."""

MAX_STALLS = 100_000
"""Maximum number of drawn stalls.

Later ones are only counted, so that alternating rows do not fill the page.
"""

FIELDS = (
    "arrived",
    "admitted",
    "first",
    "ended",
    "prompt",
    "cached",
    "output",
    "preemptions",
    "recomputed",
    "stalled",
)
"""The numbers stored for each request: steps of milestones (-1: not reached), tokens, counts."""

ARRIVED, ADMITTED, FIRST, ENDED, PROMPT, CACHED, OUTPUT, PREEMPTIONS, RECOMPUTED, STALLS = range(10)
LAST_TOKEN_AT, LOST = 10, 11
"""Not shown: the time of the last token in nanoseconds, and the tokens lost by preemption."""


@define
class Lanes:
    """Follows every request from the step that first saw it.

    - *queued*: until it is admitted
    - *prefill*: up to and including the step that samples its next token
    - *decode*: afterwards
    - *stalled*: it has a row and work to do, but is not in the step
    - *preempted*: from the step that took its row until it gets another, or to the end
    """

    # A request's arrival number is its lane's index plus one: both count Arrived events. Ids would
    # not do, because one may be reused after its first request has ended.

    limits: Limits
    ids: list[str] = field(factory=list)
    reasons: list[str] = field(factory=list)
    priorities: list[int] = field(factory=list)
    segments: list[list[tuple[int, int]]] = field(factory=list)
    gaps: Counter[int] = field(factory=Counter)
    waits: list[int] = field(factory=list)
    num_stalls: int = 0
    num_preempted: int = 0
    table: Ints = field(factory=lambda: np.zeros((LOST + 1, 64), np.int64))
    lane_of: Ints = field(factory=lambda: np.zeros(64, np.int64))
    admission_ids: Ints = field(init=False)
    num_computed: Ints = field(init=False)
    phases: Ints = field(init=False)
    has_sampled: Ints = field(init=False)
    arrival_times: list[int] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        rows = self.limits.max_rows
        self.admission_ids = np.zeros(rows, np.int32)
        self.num_computed = np.zeros(rows, np.int32)
        self.phases = np.full(rows, GONE, np.int8)
        self.has_sampled = np.zeros(rows, bool)

    def add_step(self, recorded: RecordedStep, at: int, state: State, plan: Plan) -> None:
        """Add a step that began at `at` nanoseconds and led to `state`."""
        number, admission_ids = recorded.number, state.row_counters[RowCounter.ADMISSION_ID]
        for event in recorded.events:
            if isinstance(event, Arrived):
                self._add_lane(event.request, number, at)
        self._count_tokens(state, number, at)
        # Before the rows change: a row that changes its request without an end was preempted.
        self._end_lanes(state, number)
        if not np.array_equal(admission_ids, self.admission_ids):
            self._change_rows(state, number)
        self._follow_rows(state, plan, number)
        # Copied, since the next step overwrites them.
        self.admission_ids = admission_ids.copy()
        self.num_computed = state.row_counters[RowCounter.NUM_COMPUTED].copy()

    def _add_lane(self, request: Request, number: int, at: int) -> None:
        """Begin the lane of a request that arrived."""
        lane = len(self.ids)
        self.table = _grow(self.table, lane)
        self.table[:, lane] = 0
        self.table[[ADMITTED, FIRST, ENDED], lane] = -1
        self.table[[ARRIVED, PROMPT], lane] = number, len(request.prompt)
        self.priorities.append(request.priority)
        self.ids.append(request.id)
        self.reasons.append("")
        self.segments.append([(number, QUEUED)])
        self.arrival_times.append(at)

    def _count_tokens(self, state: State, number: int, at: int) -> None:
        """Count the output tokens that became known, and the time since each request's last."""
        outcome = state.outcome
        lanes = self.lane_of[outcome.accepted_ids]
        if not len(lanes):
            return
        table = self.table
        # `+=` would count a repeated lane only once.
        np.add.at(table[OUTPUT], lanes, outcome.accepted_counts)
        lanes = np.unique(lanes)
        again = table[FIRST, lanes] >= 0
        new, old = lanes[~again], lanes[again]
        table[FIRST, new] = number
        self.waits += [at - self.arrival_times[lane] for lane in new.tolist()]
        gaps, counts = np.unique(at - table[LAST_TOKEN_AT, old], return_counts=True)
        self.gaps.update(dict(zip(gaps.tolist(), counts.tolist(), strict=True)))
        table[LAST_TOKEN_AT, lanes] = at

    def _end_lanes(self, state: State, number: int) -> None:
        """End the lanes of the requests that ended."""
        queued: set[int] = set()
        if any(not ended.admission_id for ended in state.ended):
            queued = {entry.arrival for entry in state.waiting}
        for ended in state.ended:
            lane = (
                int(self.lane_of[ended.admission_id])
                if ended.admission_id
                else self._find_waiting_lane(ended.id, queued)
            )
            if self.segments[lane][-1][1] == PREEMPTED:
                self.num_preempted -= 1
            self.reasons[lane] = ended.reason
            self.table[ENDED, lane] = number
            self._begin_phase(lane, number, GONE)

    def _find_waiting_lane(self, id: str, queued: set[int]) -> int:
        """Return the lane of a request that ended without a row.

        `queued`: arrival numbers of the requests that are still waiting
        """
        outside = (QUEUED, PREEMPTED)  # an id may have been reused after its first request ended
        return next(
            lane
            for lane, name in enumerate(self.ids)
            if name == id and lane + 1 not in queued and self.segments[lane][-1][1] in outside
        )

    def _change_rows(self, state: State, number: int) -> None:
        """Record which requests lost their rows before their end, then which got rows."""
        admission_ids = state.row_counters[RowCounter.ADMISSION_ID]
        changed = np.flatnonzero(admission_ids != self.admission_ids)
        for row in changed[self.admission_ids[changed] > 0].tolist():
            lane = int(self.lane_of[self.admission_ids[row]])
            if self.table[ENDED, lane] < 0:
                self.table[PREEMPTIONS, lane] += 1
                self.table[LOST, lane] = max(self.table[LOST, lane], self.num_computed[row])
                self.num_preempted += 1
                self._begin_phase(lane, number, PREEMPTED)
        self.phases[changed] = GONE
        self.has_sampled[changed] = False
        for row in changed[admission_ids[changed] > 0].tolist():
            lane, admission_id = (
                int(state.row_counters[RowCounter.ARRIVAL, row]) - 1,
                int(admission_ids[row]),
            )
            self.lane_of = _grow(self.lane_of, admission_id)
            self.lane_of[admission_id] = lane
            if self.table[ADMITTED, lane] < 0:
                self.table[ADMITTED, lane] = number
                self.table[CACHED, lane] = state.row_counters[RowCounter.NUM_CACHED, row]
            else:
                self.num_preempted -= 1

    def _follow_rows(self, state: State, plan: Plan, number: int) -> None:
        """Record what each running request does in the step."""
        counters, rows = state.row_counters, plan.rows
        lanes = self.lane_of[plan.admission_ids]
        again = np.minimum(plan.stops, self.table[LOST, lanes]) - plan.starts
        self.table[RECOMPUTED, lanes] += np.maximum(again, 0)
        self.table[LOST, lanes[plan.stops >= self.table[LOST, lanes]]] = 0
        phases = self.phases.copy()
        phases[counters[RowCounter.ADMISSION_ID] == 0] = GONE
        phases[rows] = np.where(self.has_sampled[rows], DECODE, PREFILL)
        # After the phases: the step that samples a token still counts as prefill.
        self.has_sampled[rows[plan.samples > 0]] = True
        has_work = (
            np.minimum(counters[RowCounter.NUM_TOKENS], counters[RowCounter.LAST_POSITION])
            > counters[RowCounter.NUM_COMPUTED]
        )
        # a row that waits for its sample is not stalled: it has no work yet
        has_work &= (
            counters[RowCounter.WAIT_FOR_SAMPLE] & counters[RowCounter.NUM_PLACEHOLDERS]
        ) == 0
        has_work[rows] = False
        stalled = has_work & (counters[RowCounter.ACTIVE] > 0)
        phases[stalled] = STALLED
        self.table[STALLS, counters[RowCounter.ARRIVAL, stalled] - 1] += 1
        for row in np.flatnonzero((phases != self.phases) & (phases != GONE)).tolist():
            self._begin_phase(int(counters[RowCounter.ARRIVAL, row]) - 1, number, int(phases[row]))
        self.phases = phases

    def _begin_phase(self, lane: int, number: int, phase: int) -> None:
        """Begin a phase of a lane, replacing one that lasted no step."""
        steps = self.segments[lane]
        if phase == STALLED:
            if self.num_stalls >= MAX_STALLS:
                return
            self.num_stalls += 1
        if steps[-1][0] == number and (len(steps) > 1 or phase != GONE):
            steps.pop()
        if not steps or steps[-1][1] != phase:
            steps.append((number, phase))

    def count_phases(self, state: State) -> tuple[int, int, int, int, int]:
        """Return how many requests are queued, in prefill, in decode, stalled and preempted."""
        prefill, decode, stalled = (
            int(np.count_nonzero(self.phases == phase)) for phase in (PREFILL, DECODE, STALLED)
        )
        return len(state.waiting) - self.num_preempted, prefill, decode, stalled, self.num_preempted

    def list_numbers(self) -> dict[str, list[int]]:
        """Return the numbers by the names of FIELDS, an entry per request in order of arrival."""
        return {name: self.table[at, : len(self.ids)].tolist() for at, name in enumerate(FIELDS)}


def _grow(array: Ints, index: int) -> Ints:
    """Return the array with room for `index` along its last axis."""
    # doubled, like a list: requests arrive one by one
    if index < array.shape[-1]:
        return array
    more = max(array.shape[-1], index + 1 - array.shape[-1])
    return np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, more)])
