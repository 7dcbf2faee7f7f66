"""A thread that steps an engine, so that any thread may submit requests and get updates."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence

from headstock.engine.engine import Engine
from headstock.errors import EngineDied, HeadstockError, RequestError, describe_error, shorten
from headstock.logs import log_event
from headstock.outputs import Update
from headstock.scheduler import Request

LOG = logging.getLogger(__name__)

Sink = Callable[[Update], None]
"""Gets the updates of one request, on the loop's thread, up to one with a finish reason."""

_LONGEST_SLEEP = 1.0

_SECONDS_BEFORE_CAPTURES = 0.25
"""Seconds without work after which graphs are captured.

A client that sends one request after another, or tokenizes its first, needs the interpreter.
"""


class Loop:
    """Owns the thread that steps the engine, and calls each request's sink on it.

    KeyboardInterrupt may be raised in a caller at any point. So this class uses plain Locks alone:
    an interrupt within `with` of a Condition or an Event, which is Python code, may leave its lock
    taken for good; that of a Lock is one C call.

    `after_step` is called on the thread when the sinks have had tokens of a step, and when they
    have had its ends; once for a step that has neither; before the thread sleeps, each second of
    its sleep, and at its end.
    """

    def __init__(self, engine: Engine, after_step: Callable[[], None] | None = None) -> None:
        self.engine = engine
        self.after_step = after_step
        self.sinks: dict[str, Sink] = {}
        self.failure: HeadstockError | None = None
        self.heartbeat = time.monotonic()
        self.closing = False
        self.has_told = False
        self.has_ended = False
        self.is_abandoned = False
        # Held by `submit`. `close` takes no lock: a signal handler may call it inside `submit`.
        self.submit_lock = threading.Lock()
        # Held until the thread has emitted its last update.
        self.run_lock = threading.Lock()
        self.run_lock.acquire()
        self.abandon_lock = threading.Lock()  # taken by the one who closes an abandoned engine
        # Free only between a wake-up and the moment the thread takes it: a wake-up that comes
        # before the thread sleeps is not lost.
        self.wakeup = threading.Lock()
        self.wakeup.acquire()
        # A script need not close its engine to end, so the thread is a daemon. But one that is in
        # C++ code while the interpreter ends would abort the process (SIGABRT). Weak, or an engine
        # that was closed or dropped would stay in memory until then.
        weakref.finalize(self, _close_at_exit, weakref.ref(self), os.getpid())
        self.thread = threading.Thread(target=self._run, name="headstock-engine", daemon=True)
        self.thread.start()

    def submit(self, request: Request, sink: Sink, *, stream_tokens: bool = True) -> None:
        """Queue a request; `stream_tokens` as in `Engine.submit`.

        raises: RequestError, EngineDied
        """
        # Without the lock: to compile the grammar of an answer may take seconds.
        self.engine.preparation.check(request)
        with self.submit_lock:
            self.check_alive()
            # The sink is registered before the request is queued: its first update may come at
            # once.
            self.engine.check_request(request)
            if request.id in self.sinks:  # it has ended, but its last update is not emitted yet
                raise RequestError(
                    f"request id {shorten(request.id)} is in use; choose another", "request_id"
                )
            try:
                self.sinks[request.id] = sink
                self.engine.enqueue(request, stream_tokens=stream_tokens)
                # The thread may have failed all requests before this one was queued.
                self.check_alive()
            except BaseException:  # EngineDied or Ctrl-C; the request may be queued or not
                self.sinks.pop(request.id, None)
                self.engine.abort(request.id)
                raise
        self._wake()

    def abort(self, id: str) -> None:
        """End a request; its sink gets a last update. Unknown ids are ignored."""
        self.engine.abort(id)
        self._wake()

    def reset_prefix_cache(self) -> None:
        """Call `Engine.reset_prefix_cache`.

        raises: EngineDied
        """
        self.check_alive()
        self.engine.reset_prefix_cache()
        self._wake()

    def _wake(self) -> None:
        """Wake the thread, or keep it from falling asleep."""
        with contextlib.suppress(RuntimeError):  # a wake-up is pending already
            self.wakeup.release()

    def check_alive(self) -> None:
        """Raise EngineDied when the engine serves no more requests."""
        if self.failure is not None:
            raise EngineDied(f"the engine stopped: {self.failure}") from self.failure
        if self.closing:
            raise EngineDied("the engine is closed; make a new one")

    def _run(self) -> None:
        """Step while there is work, and sleep otherwise.

        The thread itself emits the last updates, because Ctrl-C may interrupt `close`.
        """
        try:
            while self._wait_for_work():
                self.has_told = False
                updates = self.engine.step(self._tell)
                if updates or not self.has_told:
                    self._tell(updates)
            self._emit(self.engine.final_updates())
        except BaseException as error:
            # Even SystemExit, from a plugin: the callers wait for updates of this thread alone.
            try:
                LOG.critical(log_event("engine died"), exc_info=error)
            finally:
                self._fail_requests(error)
        finally:
            with contextlib.suppress(Exception):
                self._report_step()
            self.has_ended = True
            self.run_lock.release()
            if self.is_abandoned:
                self._close_abandoned()

    def _wait_for_work(self) -> bool:
        """Sleep until there is work; return False when the loop is closing.

        After a while without work graphs are captured, one at a time: a request that arrives
        meanwhile waits for no more.
        """
        capture_at = time.monotonic() + _SECONDS_BEFORE_CAPTURES
        while not self.closing and not self.engine.has_work:
            self.engine.executor.check_alive()
            self._report_step()
            seconds = _LONGEST_SLEEP
            if not self.engine.late_captures.is_done:
                seconds = capture_at - time.monotonic()
                if seconds <= 0:
                    self.engine.prepare_next()
                    continue
            self.wakeup.acquire(timeout=seconds)
        # The scheduler may idle on purpose; what it should know of ends the wait.
        while not self.closing and (seconds := _measure_wait(self.engine)) > 0:
            self._report_step()
            self.wakeup.acquire(timeout=min(seconds, _LONGEST_SLEEP))
        return not self.closing

    def _tell(self, updates: Sequence[Update]) -> None:
        """Call the sinks, and report it: tokens are passed on before the next step is planned."""
        if updates:
            self._emit(updates)
        self.has_told = True
        self._report_step()

    def _report_step(self) -> None:
        """Note that the thread lives, and call `after_step`."""
        self.heartbeat = time.monotonic()
        if self.after_step is not None:
            self.after_step()

    def _emit(self, updates: Sequence[Update]) -> None:
        """Call the sinks; a sink that raises ends its own request and no other."""
        for update in updates:
            sink = self.sinks.get(update.id)
            if sink is None:
                continue
            if update.finish_reason is not None:
                self.sinks.pop(update.id, None)
            try:
                sink(update)
            except Exception as error:
                LOG.error(log_event("a sink raised", request=update.id), exc_info=error)
                self.sinks.pop(update.id, None)
                self.engine.abort(update.id)

    def _fail_requests(self, error: BaseException) -> None:
        """End every request with the error that stopped the engine."""
        self.failure = (
            error if isinstance(error, HeadstockError) else EngineDied(describe_error(error))
        )
        message = f"the engine stopped: {self.failure}"
        self._emit([Update(id=id, finish_reason="error", error=message) for id in list(self.sinks)])

    def close(self) -> None:
        """Stop after the step in flight; live requests end with reason "abort"."""
        self.closing = True
        self._wake()
        if threading.current_thread() is not self.thread:
            # Not `join` alone: after Ctrl-C in it, Python takes the thread for ended while it runs.
            with self.run_lock:
                pass
            self.thread.join()

    def abandon(self) -> None:
        """Stop after the step in flight and then close the engine, without waiting here.

        The garbage collector calls this, so from any thread at any point, the loop's own included.
        """
        # Set before `has_ended` is read, and the thread reads it after it has set that: so one of
        # the two closes the engine, whatever their order.
        self.is_abandoned = True
        self.closing = True
        self._wake()
        self._close_abandoned()

    def _close_abandoned(self) -> None:
        """Close the engine if the thread has ended; the lock lets one of two callers do it."""
        if self.has_ended and self.abandon_lock.acquire(blocking=False):  # never released
            self.engine.close()


def _close_at_exit(ref: weakref.ref[Loop], process_id: int) -> None:
    """Close a loop that still lives as the interpreter ends, and its engine.

    A forked process has no thread of it, and leaves files and the device to the one that has.
    """
    loop = ref()
    if loop is None or os.getpid() != process_id:
        return
    while True:
        try:
            loop.close()
            loop.engine.close()
            return
        except KeyboardInterrupt:  # nothing may run when the interpreter ends
            continue


def _measure_wait(engine: Engine) -> float:
    """Seconds until the scheduler wants to be asked again; 0 where a step has something to do."""
    if engine.arrivals.queue or engine.in_flight or engine.plan is None or len(engine.plan.rows):
        return 0.0
    return engine.start_time + engine.state.next_ask / 1000 - time.monotonic()
