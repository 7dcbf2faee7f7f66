"""The engine: requests in, updates out, one scheduling step at a time."""

from __future__ import annotations

import logging
from collections import deque
from pathlib import Path

import numpy as np

from headstock.config import EngineConfig
from headstock.engine.build import Report, build
from headstock.engine.inline import Outcome
from headstock.engine.ledger import Ledger
from headstock.engine.summary import EngineStats, EngineSummary, summarize
from headstock.engine.update import Update
from headstock.errors import CapacityError, EngineDied, HeadstockError, RequestError, shown
from headstock.logs import event
from headstock.record.file import check_writable
from headstock.record.header import describe
from headstock.record.recorder import Recorder
from headstock.schedule import Aborted, Arrived, Cleared, Event, Failed, Plan, Request, Sampled, initial, refusal, step
from headstock.spi import Pending

LOG = logging.getLogger(__name__)


class Engine:
    """The one stateful object: it owns the device through its executor, and the scheduler's state as a value.

    `submit` and `abort` may be called from any thread, the rest from one (`headstock.engine.loop.Loop` does so).
    raises: UsageError, PluginBroken, SpiMismatch, CannotRun, ModelError
    """

    def __init__(self, config: EngineConfig, report: Report | None = None) -> None:
        check_writable(config.record)
        parts = build(config, report)
        self.config = parts.config
        self.model = parts.model
        self.limits = parts.limits
        self.executor = parts.executor
        self.directory: Path = parts.directory
        self.summary: EngineSummary = summarize(parts)
        self.state = initial(self.limits)
        self.ledger = Ledger()
        self.recorder = Recorder(
            describe(self.config, self.limits), self.limits, config.record, prompts=config.record_prompts
        )
        self.inbox: deque[Event] = deque()
        self.plan: Plan | None = None

    @property
    def max_seq_len(self) -> int:
        """The most tokens of a request, prompt and output together."""
        return self.limits.max_len

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids that end a sequence, by the model's config.json."""
        return self.model.eos_ids

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.inbox or self.state.waiting or self.state.num_running)

    def submit(self, request: Request) -> None:
        """Queue a request.

        raises: RequestError; CapacityError when it can never fit, or not now under `--on-pressure reject`
        """
        self.check(request)
        self.ledger.open(request)
        self.inbox.append(Arrived(request))

    def check(self, request: Request) -> None:
        """Raise RequestError when the request is not for this engine."""
        if self.ledger.knows(request.id):
            raise RequestError(f"request id {shown(request.id)} is in use; choose another", "request_id")
        prompt = request.prompt
        if len(prompt) and (int(prompt.min()) < 0 or int(prompt.max()) >= self.model.vocab):
            wrong = int(prompt.min()) if int(prompt.min()) < 0 else int(prompt.max())
            raise RequestError(f"token {wrong} is not in the vocabulary of {self.model.vocab}", "prompt")
        reason = refusal(request, self.limits)
        if reason is not None:
            raise CapacityError(reason, "prompt")
        if self.config.on_pressure == "reject" and self.pressure >= self.config.memory_threshold:
            raise CapacityError(
                f"{self.pressure:.0%} of the KV pool is in use and --memory-threshold is "
                f"{self.config.memory_threshold}; try again when running requests have ended",
                "prompt",
            )

    @property
    def pressure(self) -> float:
        """The share of the pool's pages that running requests hold, or that queued ones will need for their prompts."""
        total = self.limits.num_pages[0]
        held = int(np.count_nonzero(self.state.refs[0]))
        queued = sum(self.limits.pages_for(len(entry.tokens)) for entry in self.state.waiting)
        queued += sum(self.limits.pages_for(len(e.request.prompt)) for e in self.inbox if isinstance(e, Arrived))
        return min((held + queued) / total, 1.0)

    def abort(self, id: str) -> None:
        """End a request; nothing happens when there is none of that id."""
        self.inbox.append(Aborted(id))

    def reset_prefix_cache(self) -> None:
        """Free the pages that only the prefix index keeps, before anything submitted later; the peak counts anew."""
        self.ledger.peak_held_pages = 0
        self.inbox.append(Cleared())

    def step(self) -> tuple[Update, ...]:
        """Run the plan that was made last, tell what came of it, and plan what is next."""
        events: list[Event] = []
        outcome: Outcome | None = None
        if self.plan is not None and len(self.plan.rows):
            outcome = self.run(self.plan)
            events += self.news(self.plan, outcome)
        while self.inbox:
            events.append(self.inbox.popleft())
        try:
            state, plan = step(self.state, tuple(events), self.limits)
        except HeadstockError as error:
            LOG.error(event("the scheduler failed", recording=self.recorder.died(events, error)))
            raise
        except Exception as error:
            said = self.recorder.died(events, error)
            raise EngineDied(f"the scheduler failed: {type(error).__name__}; {said}") from error
        self.recorder.step(events, state, plan)
        updates = self.ledger.settle(self.plan, outcome, state)
        self.state, self.plan = state, plan
        self.ledger.seat(plan, state)
        return updates

    def run(self, plan: Plan) -> Outcome | None:
        """What the plan sampled; None when its step failed, which fails its requests and leaves the engine alive."""
        joined = {row: self.state.seats[row] for row in plan.joined.tolist()}
        try:
            pending: Pending = self.executor.execute(plan, joined)
            outcome: Outcome = pending.wait()
            return outcome
        except Exception as error:
            said = self.recorder.report()
            LOG.error(event("step failed", step=plan.number, rows=len(plan.rows), recording=said), exc_info=error)
            return None

    def news(self, plan: Plan, outcome: Outcome | None) -> list[Event]:
        """What the scheduler is told of a step that ran: tokens of healthy rows, failure of the others."""
        if outcome is None:
            return [Failed(plan.rows, plan.orders)]
        sampled = plan.samples > 0
        last = outcome.last_logits[sampled]
        rows, orders = plan.rows[sampled], plan.orders[sampled]
        healthy, tokens = outcome.healthy[last], outcome.tokens[last].astype(np.int32)
        events: list[Event] = []
        if not healthy.all():
            sick = ~healthy
            LOG.error(event("logits are not finite", step=plan.number, rows=int(sick.sum())))
            events.append(Failed(rows[sick], orders[sick]))
            rows, orders, tokens = rows[healthy], orders[healthy], tokens[healthy]
        if len(rows):
            events.append(Sampled(rows, orders, None, tokens))
        return events

    def stats(self) -> EngineStats:
        """Counts since the start, and what is the case now."""
        state, total = self.state, self.limits.num_pages[0]
        free = state.num_free[0]
        held = int(np.count_nonzero(state.refs[0]))
        return EngineStats(
            running=state.num_running,
            waiting=len(state.waiting),
            steps=state.num_steps,
            preemptions=state.num_preempted,
            free_pages=free,
            cached_pages=total - free - held,
            total_pages=total,
            prompt_tokens=self.ledger.prompt_tokens,
            cached_tokens=self.ledger.cached_tokens,
            output_tokens=self.ledger.output_tokens,
            failed=self.ledger.failed,
            peak_held_pages=self.ledger.peak_held_pages,
        )

    def close(self) -> None:
        """Free the device. The engine is not used afterwards."""
        self.recorder.close()
        self.executor.close()
