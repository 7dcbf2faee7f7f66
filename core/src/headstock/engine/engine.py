"""The engine: requests in, updates out, one scheduling step at a time."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from attrs import evolve

from headstock.callbacks import ProgressCallback
from headstock.config import EngineConfig
from headstock.debug.canary import Canary
from headstock.engine.arrivals import Arrivals
from headstock.engine.draft_model import open_draft_model
from headstock.engine.drafting import Drafting, make_drafting
from headstock.engine.failure_texts import (
    LINE,
    drop_unknown_tokens,
    log_failed_step,
)
from headstock.engine.in_flight import InFlightStep
from headstock.engine.late_planning import LatePlanner
from headstock.engine.output_tracker import OutputTracker
from headstock.engine.pacing import make_pacer
from headstock.engine.planning import RecordedPlanning
from headstock.engine.preparation import make_preparation
from headstock.engine.stall_check import StallCheck
from headstock.engine.stats import EngineStats, collect_stats
from headstock.engine.step_clock import StepClock
from headstock.engine.step_events import make_step_events
from headstock.errors import (
    PLUGIN_FAILURES,
    CapacityError,
    PluginBroken,
    RequestError,
    compose_error,
    shorten,
)
from headstock.execution.threaded import ThreadedExecutor
from headstock.outputs import Update
from headstock.record import Recorder, make_header, reserve_file
from headstock.scheduler import (
    Aborted,
    Cleared,
    Clock,
    Event,
    Plan,
    Request,
    RequestState,
    find_refusal,
    initial_state,
)
from headstock.scheduler.invariants import check_idle
from headstock.spi import Ranks
from headstock.startup.blame import PluginNames, blame_plugins
from headstock.startup.build import build_engine, run_rank
from headstock.startup.device import check_usable
from headstock.startup.part_hooks import NO_HOOKS, PartHooks
from headstock.startup.ranks import start_ranks
from headstock.startup.summary import EngineSummary, summarize_engine

LOG = logging.getLogger(__name__)

Deliver = Callable[[Sequence[Update]], None]
"""Gets updates, in the order of their tokens."""


class Engine:
    """Owns the device, through its executor, and the scheduler's state.

    Any thread may call `submit`, `abort` and `memory_pressure`; one thread, a `Loop`'s, the rest.
    hooks: wraps parts as they are built, for tests
    ranks: as in `build_engine`

    raises: UsageError, PluginBroken, SpiMismatch, CannotRun, ModelError
    """

    def __init__(
        self,
        config: EngineConfig,
        report: ProgressCallback | None = None,
        hooks: PartHooks = NO_HOOKS,
        ranks: Ranks | None = None,
    ) -> None:
        tracker = OutputTracker()
        if config.is_other_rank(os.environ):
            # Something else has started this program on each rank: rank 0 has the engine.
            run_rank(ranks or start_ranks(config))
            raise SystemExit(0)
        with reserve_file(config.record, overwrite=config.record_overwrite):
            open_model = partial(open_draft_model, Engine, config)
            parts = build_engine(config, report, hooks, tracker, ranks, open_model)
        self.names = PluginNames.of(parts.parts, parts.model.architecture)
        self.config = parts.config
        self.model = parts.model
        self.limits = parts.limits
        self.canary = parts.executor if isinstance(parts.executor, Canary) else None
        self.env = parts.env
        self.request_args = parts.request_args
        self.device_lost = False
        self.close_lock = threading.Lock()
        # A GPU's stream runs beside the host by itself; a CPU needs a thread to overlap.
        needs_thread = self.limits.overlap and parts.env.device == "cpu"
        self.executor = ThreadedExecutor(parts.executor) if needs_thread else parts.executor
        self.directory: Path = parts.directory
        self.summary: EngineSummary = summarize_engine(parts)
        self.drafting = make_drafting(parts, tracker)
        # Rows that get drafts wait for their own step. Planned beside one another, those that began
        # in different steps would take turns, and each turn reads all weights.
        self.plans_ahead = self.limits.overlap and not parts.parts.drafts_all
        try:
            with blame_plugins(self.names):
                self.state = initial_state(self.limits)
        except BaseException:
            self.executor.close()  # other ranks are processes, which nothing else would end
            if self.drafting is not None:
                self.drafting.close()
            raise
        self.output_tracker, self.preparation = tracker, make_preparation(parts)
        self.check_sampling = self.preparation.check
        header = make_header(self.config, self.limits)
        self.recorder = Recorder(header, self.limits, config.record, prompts=config.record_prompts)
        self.planning = RecordedPlanning(self.recorder, self.names)
        counts_pages = self.config.on_pressure == "reject"
        self.arrivals = Arrivals(self.limits, counts_pages=counts_pages)
        self.plan: Plan | None = None
        self.new_rows: dict[int, RequestState | None] = {}
        self.in_flight: deque[InFlightStep] = deque()
        self.stall_check = StallCheck(self.limits.scheduler)
        self.start_time = time.monotonic()
        self.step_clock = StepClock()
        self.late_planner = LatePlanner(
            self.step_clock, enabled=self.limits.overlap and config.late_planning
        )
        self.pacer = make_pacer(config, parts.env.device, parts.graph_sizes.tokens)
        self.late_captures, self.kept_profile = parts.late_captures, parts.kept_profile

    @property
    def max_seq_len(self) -> int:
        """The most tokens of a request, prompt and output together."""
        return self.limits.max_len

    @property
    def length_hint(self) -> str:
        """What would let requests have more tokens, for errors."""
        return self.limits.length_hint

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids that end a sequence, by the model's config.json."""
        return self.model.eos_ids

    @property
    def has_work(self) -> bool:
        """Whether a step would have anything to do."""
        # A step in flight is the usual case, and the cheapest to see.
        if self.in_flight or self.arrivals.queue:
            return True
        return bool(self.state.num_running or self.state.waiting)

    def submit(self, request: Request, *, stream_tokens: bool = True) -> None:
        """Check a request and queue it.

        With `stream_tokens` every token is an update; without it, the first token is one and all
        others come with the end.

        raises: RequestError; CapacityError when it can never fit, or not now under
            `--on-pressure reject`
        """
        self.preparation.check(request)
        self.check_request(request)
        self.enqueue(request, stream_tokens=stream_tokens)

    def enqueue(self, request: Request, *, stream_tokens: bool) -> None:
        """Queue a request that `preparation.check` and `check_request` have passed.

        After an interrupt at any point of this method, `abort` still removes the request.
        """
        request = self.preparation.prepare(request)
        followed = self.preparation.start_grammar(request)
        self.arrivals.add_request(request, followed, stream_tokens=stream_tokens)

    def check_request(self, request: Request) -> None:
        """Raise RequestError when this engine cannot take the request now, or ever."""
        if request.id in self.arrivals.requests or self.output_tracker.has_request(request.id):
            raise RequestError(
                f"request id {shorten(request.id)} is in use; choose another", "request_id"
            )
        reason = find_refusal(request, self.limits)
        if reason is not None:
            raise CapacityError(reason, "prompt")
        if (
            self.config.on_pressure == "reject"
            and self.memory_pressure >= self.config.memory_threshold
        ):
            raise CapacityError(
                f"{self.memory_pressure:.0%} of the KV pool is in use and memory_threshold "
                f"(--memory-threshold) is {self.config.memory_threshold}; try again when "
                "running requests have ended",
                "prompt",
            )

    @property
    def memory_pressure(self) -> float:
        """The share of pages that requests hold or wait for, in the KV group where it is largest.

        It is kept up to date under `--on-pressure reject` alone.
        """
        return self.arrivals.pressure

    def abort(self, id: str) -> None:
        """End a request; unknown ids are ignored."""
        self.arrivals.add(Aborted(id))

    def reset_prefix_cache(self) -> None:
        """Free the pages that only the prefix index holds, before later requests are admitted.

        The peak of held pages starts again at 0.
        """
        self.output_tracker.peak_held_pages = 0
        self.arrivals.add(Cleared())

    def step(self, deliver: Deliver | None = None) -> tuple[Update, ...]:
        """Launch the last plan, collect a finished step, and plan the next one.

        Without overlap, and where all rows get drafts, the collected step is the one just
        launched. With overlap it is the one before: the device goes straight on to the last plan
        and runs it while the host plans, so every sample is read one step late.

        deliver: gets the tokens of the collected step before the next one is planned; without it
            they are returned with the ends of requests
        """
        # Launch before collecting, so that the device works while the host waits and plans.
        launched = self._launch_step()
        num_kept = 1 if self.plans_ahead and launched else 0
        collected = self._collect_step() if len(self.in_flight) > num_kept else None
        results, errors = self._make_events(collected)
        # All waiting times use this clock; schedulers read no other.
        clock = Clock(int(1000 * (time.monotonic() - self.start_time)))
        state = self.state
        self.planning.begin(state, [clock, *results])
        outcome = state.outcome
        # Before `track_admissions`: the results name admissions that the next plan may replace.
        updates = self.output_tracker.collect(collected, outcome)
        if deliver is not None and updates:
            deliver(updates)
            updates = ()
        # Finished requests are reported after the next step is planned. New arrivals cannot be
        # admitted before requests that already wait.
        has_news = bool(updates or state.ended or self.arrivals.has_aborts)
        running = self.in_flight[0] if self.in_flight else None
        self.late_planner.wait(
            running.plan if running is not None and running.pending is not None else None,
            is_urgent=has_news or bool(state.waiting),
        )
        # After the results: a request that its last token ends has ended, even if an abort is
        # queued.
        later, arrived = self.arrivals.take(self.output_tracker)
        later += self.pacer.make_events(
            state,
            has_arrivals=bool(arrived),
            num_streams=self.output_tracker.num_streams,
            num_ended=self.output_tracker.num_ended_streams,
            now=self.step_clock.now(),
        )
        next_plan = self.planning.finish(state, [clock, *results], later)
        # Ends come last: callers that see one must find the request already removed.
        updates += self.output_tracker.finish_requests(state.ended, errors)
        self.plan = next_plan
        self.new_rows = {row: state.requests_by_row[row] for row in next_plan.new_row_ids.tolist()}
        self.preparation.follow(outcome)
        self.output_tracker.track_admissions(next_plan, state, self.limits)
        if self.drafting is not None:
            self.drafting.track_admissions(self.new_rows)
            # At no other time does an admission id lose its request.
            if state.ended or self.new_rows:
                self._end_drafted_rows(self.drafting)
        self.arrivals.count(state, self.output_tracker, arrived)
        if self.canary is not None:
            self.canary.set_free_pages(next_plan, state)
        is_idle = not (results or later or self.in_flight or len(next_plan.rows))
        has_work = self.has_work
        if not has_work:
            self._check_idle()
        stall = self.stall_check.find_stall(state, has_work=has_work, is_idle=is_idle)
        if stall is not None:
            raise self._explain(stall)
        return updates

    def _end_drafted_rows(self, drafting: Drafting) -> None:
        """Tell the proposer which rows are over.   raises: PluginBroken by it"""
        try:
            drafting.end_rows()
        except PluginBroken as error:
            raise self._explain(str(error)) from error

    def prepare_next(self) -> None:
        """Capture one graph, while there is no work."""
        self.late_captures.prepare_next(self.executor)

    def _explain(self, text: str) -> PluginBroken:
        """Make the error of a plugin that ends the engine."""
        return PluginBroken(compose_error(text, self.recorder.write_crash_recording(), most=LINE))

    def _make_events(self, collected: InFlightStep | None) -> tuple[list[Event], Mapping[int, str]]:
        """Make the events of a step's result, and explain failures by admission id.

        raises: PluginBroken by the proposer
        """
        if collected is None:
            return [], {}
        in_flight = self.in_flight[-1].plan if self.in_flight else None
        try:
            events = make_step_events(
                collected.plan, collected.sample, self.drafting, in_flight, collected.pending
            )
        except PluginBroken as error:
            raise self._explain(str(error)) from error
        return events, collected.explain(events, self.preparation.explain_failure)

    def _check_idle(self) -> None:
        """Raise an error when an idle engine still holds rows or pages, which would leak.

        raises: PluginBroken, EngineDied
        """
        try:
            check_idle(self.state, self.limits)
        except PLUGIN_FAILURES as error:
            raise self.planning.explain_idle_error(error, self.limits.cache) from error

    def _launch_step(self) -> bool:
        """Launch the last plan; return False when it has no rows."""
        if self.plan is None or not len(self.plan.rows):
            return False
        plan, self.plan = self.plan, None
        self.step_clock.note_launch()
        try:
            self.in_flight.append(InFlightStep(plan, self.executor.execute(plan, self.new_rows)))
            self.late_planner.note_launched()
        except PLUGIN_FAILURES as error:
            # It takes its turn as a step without a result, so that failures keep the plans' order.
            failed = InFlightStep(plan, None, failure=self._fail_step(plan, error))
            self.in_flight.append(failed)
        return True

    def _collect_step(self) -> InFlightStep:
        """Wait for the oldest step in flight.

        A failed step has no sample: its requests fail, and the engine goes on.
        """
        oldest, waited = self.in_flight.popleft(), 0.0
        try:
            if oldest.pending is None:
                return oldest
            began = time.monotonic()
            sample = oldest.pending.wait()
            waited = time.monotonic() - began
            self.output_tracker.count_step(oldest.pending)
            if self.drafting is not None:
                self.drafting.count_step(oldest.plan, oldest.pending)
                if oldest.pending.has_drafts and self.drafting.needs_drafts(oldest.plan):
                    oldest.pending.wait_drafts()  # here, where an error fails the step
            collected = evolve(oldest, sample=sample, reasons=oldest.pending.reasons)
            return drop_unknown_tokens(collected, self.model.vocab, self.names.ops)
        except PLUGIN_FAILURES as error:
            return evolve(oldest, failure=self._fail_step(oldest.plan, error))
        finally:
            seconds = self.step_clock.note_end()
            self.pacer.note_end(oldest.plan, seconds)
            self.late_planner.note_end(oldest.plan, seconds, waited)

    def _fail_step(self, plan: Plan, error: BaseException) -> str:
        """Log a step that failed, and return why it did; raise EngineDied for a lost device."""
        self.kept_profile.note_failure(error)
        text = log_failed_step(plan, error, self.names, self.recorder.write_crash_recording())
        # Asked now and not at the next step: a CUDA error is sticky and would fail every later
        # request one by one. Assume the worst until the device answers.
        self.device_lost = True
        check_usable(self.env)
        self.device_lost = False
        return text

    def final_updates(self) -> list[Update]:
        """End every live request with reason "abort", after the last step."""
        self.arrivals.take(self.output_tracker)
        return self.output_tracker.make_final_updates(self.state)

    def stats(self) -> EngineStats:
        """Counts since the start, and the present state."""
        counts = None if self.drafting is None else self.drafting.counts
        return collect_stats(self.state, self.limits, self.output_tracker, counts)

    def close(self) -> None:
        """Free the device, one caller at a time; the engine must not be used afterwards.

        References to this engine do not keep device memory. A lost device keeps its memory,
        because torch aborts a process that frees pinned memory then.
        """
        with self.close_lock:
            try:
                self.recorder.close()
            finally:
                self.preparation.close()
                if self.drafting is not None:
                    self.drafting.close()
                if not self.device_lost:
                    self.executor.close()
                    self.in_flight.clear()
