"""A scheduler that is driven over a toy device, step by step."""

from __future__ import annotations

from functools import partial

import numpy as np
from attrs import define, evolve, field

from headstock.scheduler import (
    Arrived,
    Clock,
    Event,
    Limits,
    Plan,
    Pooled,
    Request,
    RequestState,
    RowCounter,
    Sampled,
    State,
    initial_state,
    step,
)
from headstock.spi import (
    Budget,
    ScheduleDecision,
    ScheduleFunction,
    View,
)
from headstock_conformance.scheduler.toy_device import VOCAB, ToyDevice, is_state, next_token
from headstock_conformance.scheduler.transitions import TransitionChecker


@define
class Drive:
    """Runs a state to its end and keeps every request's output.

    Under `limits.overlap` the samples of a plan reach the scheduler one step late, and the next
    plan is made without them. With `rng`, rows also get up to three drafts, randomly right or
    wrong, and some rows are held for them.

    tick: milliseconds from one step to the next; 0 for no clock
    waited: milliseconds that the scheduler asked to wait, which pass at once
    picks_victims: the scheduler preempts rows by its own rules, which checks cannot know
    """

    limits: Limits
    rng: np.random.Generator | None = None
    tick: int = 0
    waited: int = 0
    picks_victims: bool = False
    state: State = field(init=False)
    device: ToyDevice = field(init=False)
    events: list[Event] = field(factory=list)
    outputs: dict[str, list[int]] = field(factory=dict)
    reasons: dict[str, str] = field(factory=dict)
    names: dict[int, str] = field(factory=dict)
    plans: list[Plan] = field(factory=list)
    planned: tuple[Plan, dict[int, RequestState]] | None = None
    in_flight: Sampled | None = None
    pooled_in_flight: Pooled | None = None
    transitions: TransitionChecker = field(init=False)

    def __attrs_post_init__(self) -> None:
        if self.rng is not None and not self.limits.max_drafts:
            # As many rows have pages for their states as before, and there is as much for copies.
            pages = (
                count + 3 * min(count, self.limits.max_rows) if is_state(group) else count
                for count, group in zip(self.limits.num_pages, self.limits.groups, strict=True)
            )
            self.limits = evolve(self.limits, max_drafts=3, num_pages=tuple(pages))
        if self.picks_victims:
            schedule = partial(self.schedule, self.limits.schedule)
            self.limits = evolve(self.limits, schedule=schedule)
        self.state = initial_state(self.limits)
        self.transitions = TransitionChecker(self.limits, has_drafts=self.rng is not None)
        self.device = ToyDevice(self.limits)

    def schedule(self, choose: ScheduleFunction, view: View, budget: Budget) -> ScheduleDecision:
        """The scheduler's decision; its victims are allowed."""
        decision = choose(view, budget)
        # The scheduler's caller refuses results that are not decisions.
        victims = getattr(decision, "victims", None)
        if isinstance(victims, np.ndarray) and victims.dtype.kind in "iu":
            for row in victims[np.isin(victims, view.rows_by_priority)].tolist():
                request_state = self.state.requests_by_row[row]
                if request_state is not None:
                    self.transitions.allow_preemption(request_state)
        return decision

    def submit(self, request: Request) -> None:
        """Add a request."""
        self.outputs[request.id] = []
        self.events.append(Arrived(request))

    def step(self) -> Plan:
        """Launch the last plan, apply the samples that have arrived, and make the next plan."""
        arrived = self.launch()
        now = self.tick * len(self.plans)
        if not (arrived or self.events or self.in_flight):
            self.waited = max(self.waited, self.state.next_ask - now)
        clock = (Clock(now + self.waited),) if self.tick or self.waited else ()
        events = (*clock, *((arrived,) if arrived else ()), *self.events)
        plan = step(self.state, events)
        self.events = []
        self.plans.append(plan)
        self.collect_results()
        self.transitions.check_state(self.state)
        self.planned = (
            plan,
            {
                row: request_state
                for row in plan.new_row_ids.tolist()
                if (request_state := self.state.requests_by_row[row]) is not None
            },
        )
        return plan

    def launch(self) -> Sampled | None:
        """Launch the last plan; return the samples that arrive, with drafts for their rows."""
        arrived, self.in_flight = self.in_flight, None
        pooled, self.pooled_in_flight = self.pooled_in_flight, None
        if self.planned is not None and len(self.planned[0].rows):
            self.in_flight = self.device.run(*self.planned)
            self.pooled_in_flight = self.device.pooled_event
        if not self.limits.overlap:
            arrived, self.in_flight = self.in_flight, None
            pooled, self.pooled_in_flight = self.pooled_in_flight, None
        if pooled is not None and len(pooled.rows):
            self.events.insert(0, pooled)
        return arrived if arrived is None or self.rng is None else self.propose(arrived, self.rng)

    def propose(self, arrived: Sampled, rng: np.random.Generator) -> Sampled:
        """Return the samples with drafts of the tokens after them.

        Rows of the step in flight get none. Some of these are held instead.
        """
        state, stop = self.state, 0
        drafts: list[list[int]] = []
        is_in_flight = np.zeros(len(arrived.rows), bool)
        if self.in_flight is not None:
            is_in_flight = np.isin(arrived.admission_ids, self.in_flight.admission_ids)
        # with drafts, events have the number of tokens of each row
        counts = np.ones_like(arrived.rows) if arrived.counts is None else arrived.counts
        for i, (row, count) in enumerate(zip(arrived.rows, counts, strict=True)):
            start, stop = stop, stop + count
            drafts.append([])
            is_gone = state.row_counters[RowCounter.ADMISSION_ID, row] != arrived.admission_ids[i]
            if is_in_flight[i] or is_gone:
                continue
            known = state.tokens[row, : state.row_counters[RowCounter.NUM_KNOWN, row]]
            history = [*known.tolist(), *arrived.tokens[start:stop].tolist()]
            for _ in range(int(rng.integers(0, 4))):
                right = next_token(history + drafts[i])
                drafts[i].append(right if rng.random() < 0.6 else int(rng.integers(0, VOCAB)))
        return evolve(
            arrived,
            draft_counts=np.array([len(each) for each in drafts], np.int32),
            drafts=np.array([token for each in drafts for token in each], np.int32),
            hold=(is_in_flight & (rng.random(len(drafts)) < 0.5)).astype(np.int32),
        )

    def collect_results(self) -> None:
        """Collect the tokens and ends of the last step."""
        outcome, offset = self.state.outcome, 0
        for admission_id, count in zip(
            outcome.accepted_ids.tolist(), outcome.accepted_counts.tolist(), strict=True
        ):
            self.outputs[self.names[admission_id]] += outcome.accepted_tokens[
                offset : offset + count
            ].tolist()
            offset += count
        for ended in self.state.ended:
            assert ended.id not in self.reasons, f"{ended.id} ended twice"
            self.reasons[ended.id] = ended.reason
            if ended.reason == "stop" and ended.admission_id in self.device.pooled:
                self.outputs[ended.id] = [self.device.pooled[ended.admission_id]]
        for row, request_state in enumerate(self.state.requests_by_row):
            if request_state is not None:
                self.names[int(self.state.row_counters[RowCounter.ADMISSION_ID, row])] = (
                    request_state.request.id
                )

    @property
    def busy(self) -> bool:
        """Whether any work remains."""
        return bool(self.events or self.in_flight or self.state.waiting or self.state.num_running)

    def drain(self, most: int = 20_000) -> None:
        """Step until no work remains."""
        for _ in range(most):
            if not self.busy:
                return
            self.step()
        raise AssertionError(
            f"still busy after {most} steps: {self.state.num_running} running, "
            f"{len(self.state.waiting)} waiting"
        )


def run(drive: Drive, *requests: Request) -> Drive:
    """Submit the requests and step until no work remains."""
    for one in requests:
        drive.submit(one)
    drive.drain()
    return drive
