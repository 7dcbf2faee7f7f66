"""A thread that steps an engine, so that any thread may hand requests in and hear of them."""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence

from headstock.engine.engine import Engine
from headstock.errors import EngineDied, HeadstockError, RequestError, shorten
from headstock.logs import log_event
from headstock.outputs import Update
from headstock.scheduler import Request

LOG = logging.getLogger(__name__)

Sink = Callable[[Update], None]


class Loop:
    """Owns the thread. A sink is called on it, for one request, until the update with a finish
    reason; then never again.

    Ctrl-C may strike whoever calls, at any moment. So nothing is used here that keeps a lock when
    it does, as a Condition or an Event may (their `with` is written in Python, that of a Lock is
    not).
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.sinks: dict[str, Sink] = {}
        self.failure: HeadstockError | None = None
        self.heartbeat = time.monotonic()
        self.closing = False
        self.over = False
        self.is_abandoned = False
        # of who submits; `close` takes none, as a signal's handler may call it
        self.lock = threading.Lock()
        self.running = threading.Lock()  # taken until the thread has told everyone
        self.running.acquire()
        # taken, but for the moment between a ring and whoever sleeps hearing it
        self.bell = threading.Lock()
        self.bell.acquire()
        self.thread = threading.Thread(target=self.drive, name="headstock-engine", daemon=True)
        self.thread.start()

    def submit(self, request: Request, sink: Sink, *, stream_tokens: bool = True) -> None:
        """Queue a request; `stream_tokens` as in `Engine.submit`.

        raises: RequestError, EngineDied
        """
        with self.lock:
            self.check_alive()
            # Checked first and known before it is queued: the thread may tell of it at once.
            self.engine.check(request)
            if request.id in self.sinks:  # it has ended, and is still to be told so
                raise RequestError(
                    f"request id {shorten(request.id)} is in use; choose another", "request_id"
                )
            try:
                self.sinks[request.id] = sink
                self.engine.accept(request, stream_tokens=stream_tokens)
                self.check_alive()  # everyone may have been told before it was queued
            except BaseException:  # that, or Ctrl-C: it may have been queued or not
                self.sinks.pop(request.id, None)
                self.engine.abort(request.id)
                raise
        self.ring()

    def abort(self, id: str) -> None:
        """End a request; its sink hears of it. Nothing happens when there is none of that id."""
        self.engine.abort(id)
        self.ring()

    def reset_prefix_cache(self) -> None:
        """As `Engine.reset_prefix_cache`.   raises: EngineDied"""
        self.check_alive()
        self.engine.reset_prefix_cache()
        self.ring()

    def ring(self) -> None:
        """Wake the thread, or keep it from falling asleep."""
        with contextlib.suppress(RuntimeError):  # it has been rung already
            self.bell.release()

    def check_alive(self) -> None:
        """Raise EngineDied when no request can be served any more."""
        if self.failure is not None:
            raise EngineDied(f"the engine stopped: {self.failure}") from self.failure
        if self.closing:
            raise EngineDied("the engine is closed; make a new one")

    def drive(self) -> None:
        """Step while there is work; sleep otherwise. Who is left at the end is told so here: Ctrl-C
        may break off whoever closes.
        """
        try:
            while self.wait():
                self.tell(self.engine.step())
                self.heartbeat = time.monotonic()
            self.tell(self.engine.unfinished())
        except (
            BaseException
        ) as error:  # even SystemExit, from a plugin: nobody else would tell those who wait
            try:
                LOG.critical(log_event("engine died"), exc_info=error)
            finally:
                self.fail(error)
        finally:
            self.over = True
            self.running.release()
            if self.is_abandoned:
                self.close_abandoned()

    def wait(self) -> bool:
        """Whether there is work; False when the loop is closing."""
        while not self.closing and not self.engine.has_work:
            self.bell.acquire(timeout=1.0)
            self.heartbeat = time.monotonic()
        return not self.closing

    def tell(self, updates: Sequence[Update]) -> None:
        """Pass updates on; a sink that raises loses its request and disturbs nobody else."""
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

    def fail(self, error: BaseException) -> None:
        """Tell everyone that the engine is gone."""
        self.failure = (
            error if isinstance(error, HeadstockError) else EngineDied(type(error).__name__)
        )
        said = f"the engine stopped: {self.failure}"
        self.tell([Update(id=id, finish_reason="error", error=said) for id in list(self.sinks)])

    def close(self) -> None:
        """Stop after the step in flight; requests that are left end with reason "abort"."""
        self.closing = True
        self.ring()
        if threading.current_thread() is not self.thread:
            # a `join` that Ctrl-C breaks off counts the thread as ended, though it runs
            with self.running:
                pass
            self.thread.join()

    def abandon(self) -> None:
        """Stop after the step in flight and close the engine then, without waiting for that.

        Any thread may call it at any moment, this loop's own among them: a garbage collector does.
        """
        # A daemon thread that is within C++ when the interpreter goes would end the process by
        # SIGABRT.
        atexit.register(self.thread.join)
        # before `running` is tried: the thread gives that up first and then looks here
        self.is_abandoned = True
        self.closing = True
        self.ring()
        self.close_abandoned()

    def close_abandoned(self) -> None:
        """Close the engine, if the thread has told everyone; of two that try, one does."""
        if self.running.acquire(blocking=False):  # for good
            self.engine.close()
            atexit.unregister(self.thread.join)
