"""The engine: requests in, updates out, one scheduling step at a time."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from headstock.config import EngineConfig
from headstock.debug.canary import Canary
from headstock.engine.output_tracker import Ledger
from headstock.engine.stats import EngineStats, count
from headstock.errors import (
    CapacityError,
    EngineDied,
    PluginBroken,
    RequestError,
    describe_error,
    describe_location,
    shorten,
)
from headstock.execution.executor import Outcome
from headstock.execution.threaded import WorkerThread
from headstock.logs import log_event
from headstock.outputs import Update
from headstock.record import Recorder, describe, reserved
from headstock.scheduler import (
    Aborted,
    Arrived,
    Cleared,
    Entry,
    Event,
    Failed,
    Plan,
    Request,
    Sampled,
    State,
    initial,
    refusal,
    step,
)
from headstock.scheduler.invariants import check_idle
from headstock.scheduler.selection import BLAME
from headstock.spi import Pending
from headstock.startup.build import ProgressCallback, build_engine
from headstock.startup.device import check_usable
from headstock.startup.summary import EngineSummary, summarize_engine

LOG = logging.getLogger(__name__)

MOST_IDLE = 10_000
"""Steps in a row that may run nothing though requests are there and nothing is awaited."""

Flight = tuple[Plan, Pending | None]
"""A plan given to the device, and its result to come; None when it could not even be launched."""


class Engine:
    """The one stateful object: it owns the device through its executor, and the scheduler's state
    as a value.

    `submit` and `abort` may be called from any thread, the rest from one
    (`headstock.engine.loop.Loop` does so).
    raises: UsageError, PluginBroken, SpiMismatch, CannotRun, ModelError
    """

    def __init__(self, config: EngineConfig, report: ProgressCallback | None = None) -> None:
        with reserved(config.record, overwrite=config.record_overwrite):
            parts = build_engine(config, report)
        self.config = parts.config
        self.model = parts.model
        self.limits = parts.limits
        self.canary = parts.executor if isinstance(parts.executor, Canary) else None
        self.env = parts.env
        self.lost = False
        on_cpu = parts.env.device == "cpu"
        self.executor = (
            WorkerThread(parts.executor) if self.config.overlap and on_cpu else parts.executor
        )
        self.directory: Path = parts.directory
        self.summary: EngineSummary = summarize_engine(parts)
        self.state = initial(self.limits)
        self.ledger = Ledger()
        self.recorder = Recorder(
            describe(self.config, self.limits),
            self.limits,
            config.record,
            prompts=config.record_prompts,
        )
        self.inbox: deque[Event] = deque()
        # Whose accounts are still to be opened, `stream_tokens`, and which they are of all that
        # were queued.
        self.asked: dict[str, tuple[Request, bool, int]] = {}
        self.num_queued = 0
        self.demand = 0, 0  # pages, and how many of the requests ever queued they are the pages of
        self.plan: Plan | None = None
        self.joined: dict[int, Entry | None] = {}
        self.flights: deque[Flight] = deque()
        self.idle = 0

    @property
    def max_seq_len(self) -> int:
        """The most tokens of a request, prompt and output together."""
        return self.limits.max_len

    @property
    def longer(self) -> str:
        """What would let requests have more tokens, for errors."""
        return self.limits.longer

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids that end a sequence, by the model's config.json."""
        return self.model.eos_ids

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.inbox or self.state.waiting or self.state.num_running or self.flights)

    def submit(self, request: Request, *, stream_tokens: bool = True) -> None:
        """Queue a request. Without `stream_tokens`, it is told of its first token and then of all
        others at the end.

        raises: RequestError; CapacityError when it can never fit, or not now under
            `--on-pressure reject`
        """
        self.check(request)
        self.accept(request, stream_tokens=stream_tokens)

    def accept(self, request: Request, *, stream_tokens: bool) -> None:
        """Queue a request that `check` has passed. If that is interrupted, `abort` leaves nothing
        of it.
        """
        self.num_queued += 1
        self.asked[request.id] = request, stream_tokens, self.num_queued
        self.inbox.append(Arrived(request))

    def check(self, request: Request) -> None:
        """Raise RequestError when the request is not for this engine."""
        if request.id in self.asked or self.ledger.knows(request.id):
            raise RequestError(
                f"request id {shorten(request.id)} is in use; choose another", "request_id"
            )
        prompt = request.prompt
        if len(prompt) and (int(prompt.min()) < 0 or int(prompt.max()) >= self.model.vocab):
            wrong = int(prompt.min()) if int(prompt.min()) < 0 else int(prompt.max())
            raise RequestError(
                f"token {wrong} is not in the vocabulary of {self.model.vocab}", "prompt"
            )
        for name in ("logit_bias", "allowed_token_ids"):
            ids = getattr(request.params, name) or (0,)
            if min(ids) < 0 or max(ids) >= self.model.vocab:
                wrong = min(ids) if min(ids) < 0 else max(ids)
                raise RequestError(
                    f"{name}: token {wrong} is not in the vocabulary of {self.model.vocab}", name
                )
        reason = refusal(request, self.limits)
        if reason is not None:
            raise CapacityError(self.config.spell(reason), "prompt")
        if self.config.on_pressure == "reject" and self.pressure >= self.config.memory_threshold:
            raise CapacityError(
                self.config.spell(
                    f"{self.pressure:.0%} of the KV pool is in use and --memory-threshold is "
                    f"{self.config.memory_threshold}; try again when running requests have ended"
                ),
                "prompt",
            )

    @property
    def pressure(self) -> float:
        """The share of the pool's pages that running requests hold, or that others will need for
        what they have; may be asked from any thread.
        """
        # Whom a step counts meanwhile is met twice, and told by the number: queued ones are read
        # first.
        queued = list(self.asked.values())
        pages, counted = self.demand
        pages += sum(
            self.limits.pages_for(len(r.prompt)) for r, _, number in queued if number > counted
        )
        return min(pages / self.limits.num_pages[0], 1.0)

    def abort(self, id: str) -> None:
        """End a request; nothing happens when there is none of that id."""
        self.inbox.append(Aborted(id))

    def reset_prefix_cache(self) -> None:
        """Free the pages that only the prefix index keeps, before anything submitted later; the
        peak counts anew.
        """
        self.ledger.peak_held_pages = 0
        self.inbox.append(Cleared())

    def step(self) -> tuple[Update, ...]:
        """Launch the plan that was made last, tell what came of a step that is done, and plan what
        is next.

        Without overlap that is the step just launched. With overlap it is the one before: the
        device goes from it straight to the plan made last, works on that while the next one is
        made, and what it samples is read one step late.
        """
        launched = self.launch()
        behind = 1 if self.config.overlap and launched else 0
        plan, outcome = self.land() if len(self.flights) > behind else (None, None)
        events = news(plan, outcome) if plan is not None else []
        while self.inbox:
            events.append(self.inbox.popleft())
            self.enter(events[-1])
        state, next_plan = self.schedule(events)
        updates = self.ledger.settle(plan, outcome, state)
        self.state, self.plan = state, next_plan
        self.joined = {row: state.seats[row] for row in next_plan.joined.tolist()}
        self.ledger.seat(next_plan, state, self.limits)
        self.publish_demand(events)
        if self.canary is not None:
            self.canary.expect(next_plan, state)
        self.idle = 0 if events or self.flights or len(next_plan.rows) else self.idle + 1
        if not self.has_work:
            self.check_idle()
        elif self.idle > MOST_IDLE:
            blame = self.config.spell(BLAME)
            said = (
                f"the scheduler {self.limits.scheduler!r} runs nothing, though requests wait; "
                f"{blame}"
            )
            raise PluginBroken(f"{said}; {self.recorder.report()}")
        return updates

    def enter(self, event: Event) -> None:
        """Open the account of a request that arrives."""
        if isinstance(event, Arrived):
            request, stream_tokens, _ = self.asked.get(event.request.id, (event.request, True, 0))
            self.ledger.open(
                request,
                stream_tokens=stream_tokens,
                pages=self.limits.pages_for(len(request.prompt)),
            )
        elif isinstance(
            event, Aborted
        ):  # of one that an interrupt kept out of the inbox, or of nobody
            self.asked.pop(event.id, None)

    def publish_demand(self, events: Sequence[Event]) -> None:
        """Count the pages that requests hold or will need, those that arrived with `events` among
        them.
        """
        arrived = [event.request.id for event in events if isinstance(event, Arrived)]
        if self.config.on_pressure == "reject":
            state = self.state
            held = int(np.count_nonzero(state.refs[0])) + self.ledger.unseated_pages
            if len(state.waiting) > self.ledger.unseated:
                held += sum(
                    self.limits.pages_for(len(entry.tokens))
                    for entry in state.waiting
                    if entry.preemptions
                )
            numbers = (self.asked[id][2] for id in arrived if id in self.asked)
            self.demand = held, max(numbers, default=self.demand[1])
        for id in arrived:
            self.asked.pop(id, None)

    def check_idle(self) -> None:
        """Raise EngineDied when something is left behind though no request is there: it would be
        lost for ever.
        """
        try:
            check_idle(self.state, self.limits)
        except AssertionError as error:
            raise EngineDied(f"idle, yet {error}; {self.recorder.died((), error)}") from error

    def schedule(self, events: list[Event]) -> tuple[State, Plan]:
        """The state after `events` and the next plan, recorded.

        raises: EngineDied, PluginBroken
        """
        try:
            state, plan = step(self.state, tuple(events), self.limits)
        except PluginBroken as error:
            raise PluginBroken(
                f"{self.config.spell(str(error))}; {self.recorder.died(events, error)}"
            ) from error
        except AssertionError as error:
            said = self.recorder.died(events, error)
            raise EngineDied(f"the scheduler contradicts itself: {error}; {said}") from error
        except Exception as error:
            said = self.recorder.died(events, error)
            raise EngineDied(
                f"scheduling failed in {describe_location(error)}: {describe_error(error)}; {said}"
            ) from error
        self.recorder.step(events, state, plan)
        return state, plan

    def launch(self) -> bool:
        """Give the plan that was made last to the device; whether there was anything to do."""
        if self.plan is None or not len(self.plan.rows):
            return False
        plan, self.plan = self.plan, None
        try:
            self.flights.append((plan, self.executor.execute(plan, self.joined)))
        except Exception as error:
            self.flights.append((plan, None))
            self.report(plan, error)
        return True

    def land(self) -> tuple[Plan, Outcome | None]:
        """The plan launched first of those in flight, with what it sampled.

        The outcome is None when the step failed, which fails its requests and leaves the engine
        alive.
        """
        plan, pending = self.flights.popleft()
        try:
            return plan, pending.wait() if pending is not None else None
        except Exception as error:
            self.report(plan, error)
            return plan, None

    def report(self, plan: Plan, error: Exception) -> None:
        """Log a step that failed, with a recording of how it came to that.

        raises: the error itself when it says that the engine cannot go on; EngineDied when the
            device is lost
        """
        said = self.recorder.report()
        facts = {
            "step": plan.number,
            "rows": len(plan.rows),
            "at": describe_location(error),
            "recording": said,
        }
        LOG.error(log_event("step failed", **facts), exc_info=error)
        if isinstance(error, EngineDied):
            raise error
        self.lost = True  # until it answers
        check_usable(self.env)
        self.lost = False

    def unfinished(self) -> list[Update]:
        """The last news of every request that has not ended, once this engine takes no more
        steps.
        """
        while self.inbox:
            self.enter(self.inbox.popleft())
        return self.ledger.unfinished(self.state)

    def stats(self) -> EngineStats:
        """Counts since the start, and what is the case now."""
        return count(self.state, self.limits, self.ledger)

    def close(self) -> None:
        """Free the device, also while this engine is still referred to. It is not used afterwards.

        A device that is lost keeps what it has: torch aborts a process that gives back pinned
            memory then.
        """
        try:
            self.recorder.close()
        finally:
            if not self.lost:
                self.executor.close()
                self.flights.clear()


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
        LOG.error(log_event("logits are not finite", step=plan.number, rows=int(sick.sum())))
        events.append(Failed(plan.rows[sick], plan.orders[sick]))
    told = healthy & (plan.samples > 0)
    if told.any():
        tokens = outcome.tokens[outcome.last_logits[told]].astype(np.int32)
        events.append(Sampled(plan.rows[told], plan.orders[told], None, tokens))
    return events
