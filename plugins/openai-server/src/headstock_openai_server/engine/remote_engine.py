"""An engine in another process, as seen by the process that started it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from attrs import frozen

import headstock
from headstock import (
    CapacityError,
    EngineConfig,
    EngineDied,
    HeadstockError,
    RequestError,
)
from headstock.engine import stats as engine_stats
from headstock.logs import log_event
from headstock.outputs import Update
from headstock.scheduler import Request
from headstock.startup import summary as engine_summary
from headstock_openai_server.api.errors import BusyError
from headstock_openai_server.engine.messages import (
    Abort,
    Accepted,
    Close,
    Failed,
    FromEngine,
    Inspect,
    Message,
    MessageReader,
    Ready,
    Refused,
    ResetPrefixCache,
    Snapshot,
    Start,
    StartProgress,
    Stats,
    Step,
    encode_frame,
    pack_requests,
    record_fields,
    unpack_update,
)

LOG = logging.getLogger("headstock.serve")

NEWS_SECONDS = 2
"""Seconds until the event loop must have seen the end of the process."""
EXIT_SECONDS = 30
"""Seconds that an engine process may take to exit before it is killed."""

Sink = Callable[[Update], None]
OnProgress = Callable[[str, int, int], None]


@frozen
class RemoteModel:
    """The model of an engine in another process."""

    vocab: int


class RemoteEngine:
    """The `StartedEngine` of an engine in another process. Its counts may be a second old."""

    def __init__(self, ready: Ready, loop: RemoteLoop) -> None:
        self.directory = Path(ready.directory)
        self.model = RemoteModel(ready.vocab)
        self.max_seq_len = ready.max_seq_len
        self.length_hint = ready.length_hint
        self.eos_ids = ready.eos_ids
        self.summary = engine_summary.EngineSummary(**_restore_tuples(ready.summary))
        self._loop = loop

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended."""
        return bool(self._loop.sinks)

    @property
    def request_args(self) -> None:
        """None: the process itself refuses arguments that its plugins do not accept."""

    @property
    def check_sampling(self) -> None:
        """None: the process compiles grammars while other requests run."""

    def stats(self) -> engine_stats.EngineStats:
        """The latest counts."""
        return self._loop.stats

    def close(self) -> None:
        """Do nothing: closing the loop ends the process, and that frees the device."""


def _restore_tuples(values: Any) -> Any:
    """The values with lists as tuples; msgpack has no tuples."""
    if isinstance(values, dict):
        return {name: _restore_tuples(value) for name, value in values.items()}
    return tuple(map(_restore_tuples, values)) if isinstance(values, list) else values


class RemoteLoop(asyncio.Protocol):
    """The loop of an engine process, bound to the event loop that is running when it is made.

    Sinks are called on the thread of that event loop. There, `submit_batch` submits; other threads
    call `submit`. Every other method may be called on any thread.

    last_heard: when the last message arrived, in seconds of `time.monotonic`
    snapshot: the latest; None before the first request for one
    ready: done when the engine accepts requests; a HeadstockError if it could not start
    ended: done when the process has closed its end of the socket
    """

    def __init__(self, process: subprocess.Popen[bytes], on_progress: OnProgress) -> None:
        self.process = process
        self.on_progress = on_progress
        self.event_loop = asyncio.get_running_loop()
        self.thread = threading.get_ident()
        self.reader: MessageReader[FromEngine] = MessageReader(FromEngine)
        self.transport: asyncio.WriteTransport | None = None
        self.sinks: dict[str, Sink] = {}
        self.answers: dict[int, asyncio.Future[Accepted | Refused]] = {}
        self.num_batches = 0
        self.failure: HeadstockError | None = None
        self.closing = False
        self.has_ended = False
        self.last_heard = time.monotonic()
        self.stats = engine_stats.EngineStats(
            **dict.fromkeys(engine_stats.EngineStats.__annotations__, 0)
        )
        self.snapshot: Snapshot | None = None
        self.ready: asyncio.Future[Ready] = self.event_loop.create_future()
        self.ended: asyncio.Future[None] = self.event_loop.create_future()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        # Not asserted: transports of other event loops are not asyncio.WriteTransports.
        self.transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        """Handle each message that `data` completes; an invalid one is logged and dropped."""
        self.last_heard = time.monotonic()
        try:
            for message in self.reader.feed(data):
                self._receive(message)
        except ValueError as error:
            LOG.critical(log_event("the engine's messages are out of step"), exc_info=error)
            self.process.kill()

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail everything that waits for the engine."""
        if self.failure is None:
            self.failure = EngineDied(
                "the engine is closed; make a new one"
                if self.closing
                else "the engine process ended; its log lines may say why"
            )
        self.has_ended = True
        if not self.ready.done():
            self.ready.set_exception(self.failure)
            self.ready.exception()  # nobody may be waiting for it any more
        refusal = Refused(0, str(self.failure), None, capacity=False, retry=False)
        for answer in self.answers.values():
            if not answer.done():
                answer.set_result(refusal)
        reason, error = ("abort", None) if self.closing else ("error", str(self.failure))
        for request_id, sink in list(self.sinks.items()):
            self._call_sink(sink, Update(id=request_id, finish_reason=reason, error=error))
        self.sinks.clear()
        if not self.ended.done():
            self.ended.set_result(None)

    def _receive(self, message: FromEngine) -> None:
        match message:
            case Step(updates=updates):
                for wire in updates:
                    sink = self.sinks.get(wire.id)
                    if sink is None:
                        continue
                    if wire.finish_reason is not None:
                        del self.sinks[wire.id]
                    self._call_sink(sink, unpack_update(wire))
            case Stats(counts=counts):
                self.stats = engine_stats.EngineStats(**counts)
            case Snapshot():
                self.snapshot = message
            case Accepted(batch=batch) | Refused(batch=batch):
                answer = self.answers.pop(batch, None)
                if answer is not None and not answer.done():
                    answer.set_result(message)
            case StartProgress(stage=stage, completed=completed, total=total):
                self.on_progress(stage, completed, total)
            case Ready():
                if not self.ready.done():
                    self.ready.set_result(message)
            case Failed(kind=kind, text=text):
                self.failure = _restore_error(kind, text)
                self._send(Close())  # its receiving thread waits for one

    def _call_sink(self, sink: Sink, update: Update) -> None:
        """Call a sink; an exception in it only ends its own request."""
        try:
            sink(update)
        except Exception as error:
            LOG.error(log_event("a sink raised", request=update.id), exc_info=error)
            self.sinks.pop(update.id, None)
            self.abort(update.id)

    def _send(self, message: Message) -> None:
        """Send a message from any thread; it is dropped if the engine has exited."""
        frame = encode_frame(message)
        if threading.get_ident() == self.thread:
            self._write(frame)
            return
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self.event_loop.call_soon_threadsafe(self._write, frame)

    def _write(self, frame: bytes) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(frame)

    # headstock.requests.EngineLoop

    def start(self, config: EngineConfig, log_level: str, least_level: str) -> None:
        """Tell the process to start its engine."""
        self._send(Start(record_fields(config), log_level, least_level))

    async def submit_batch(
        self, requests: Sequence[Request], sink: Sink, *, stream_tokens: bool
    ) -> None:
        """Queue all of the requests or, with an error, none.

        Without `stream_tokens`, the sink gets each request's first token at once and the others in
        one update at the end.
        raises: RequestError, BusyError, EngineDied
        """
        self.check_alive()
        self.num_batches += 1
        batch = self.num_batches
        answer: asyncio.Future[Accepted | Refused] = self.event_loop.create_future()
        self.answers[batch] = answer
        # Before the requests are sent: their first updates may come before the answer.
        for request in requests:
            self.sinks[request.id] = sink
        try:
            self._send(pack_requests(batch, requests, stream_tokens=stream_tokens))
            message = await answer
        except BaseException:  # cancelled: the requests may or may not be queued
            self._drop([request.id for request in requests])
            raise
        finally:
            self.answers.pop(batch, None)
        if isinstance(message, Refused):
            for request in requests:
                self.sinks.pop(request.id, None)
            self.check_alive()
            kind = (
                BusyError if message.retry else CapacityError if message.capacity else RequestError
            )
            raise kind(message.text, message.parameter)

    def submit(self, request: Request, sink: Sink, *, stream_tokens: bool = True) -> None:
        """Queue a request, from any thread but the event loop's.   raises: as `submit_batch`"""
        self.check_alive()
        batch = self.submit_batch([request], sink, stream_tokens=stream_tokens)
        try:
            asyncio.run_coroutine_threadsafe(batch, self.event_loop).result()
        except RuntimeError:  # the event loop is closed
            self.check_alive()
            raise

    def check_alive(self) -> None:
        """Raise EngineDied if the engine no longer serves requests."""
        if self.failure is not None:
            raise EngineDied(f"the engine stopped: {self.failure}") from self.failure
        if self.closing or self.has_ended:
            raise EngineDied("the engine is closed; make a new one")

    def abort(self, request_id: str, /) -> None:
        """End a request; its sink gets a last update. Unknown ids are ignored."""
        self._send(Abort([request_id]))

    def _drop(self, ids: list[str]) -> None:
        """End requests whose sinks want no more updates."""
        for request_id in ids:
            self.sinks.pop(request_id, None)
        if ids:
            self._send(Abort(ids))

    def drop(self, ids: Sequence[str]) -> None:
        """End the requests that have not ended, without last updates; on the event loop's thread.

        Ids that have already ended cost no message.
        """
        self._drop([request_id for request_id in ids if request_id in self.sinks])

    def request_snapshot(self) -> None:
        """Request a snapshot after the engine's next step, or within a second."""
        self._send(Inspect())

    def reset_prefix_cache(self) -> None:
        """Empty the prefix index before requests that are submitted later.   raises: EngineDied"""
        self.check_alive()
        self._send(ResetPrefixCache())

    def close(self) -> None:
        """End the process; remaining requests end with reason "abort".

        It waits for the end, so it must not be called on the event loop's thread.
        """
        self.closing = True
        self._send(Close())
        try:
            self.process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            LOG.error(log_event("the engine process did not end and is killed"))
            self.process.kill()
            self.process.wait()
        # The event loop also sees the end of the process, and informs the sinks.
        end = time.monotonic() + NEWS_SECONDS
        while not self.has_ended and self.event_loop.is_running() and time.monotonic() < end:
            time.sleep(0.005)

    def kill(self) -> None:
        """Kill the process."""
        self.closing = True
        self.process.kill()
        self.process.wait()

    def abandon(self) -> None:
        """End the process without waiting for it."""
        self.closing = True
        self._send(Close())


def _restore_error(kind: str, text: str) -> HeadstockError:
    """Rebuild an error of another process from the name of its type."""
    known = getattr(headstock, kind, None) if kind in headstock.__all__ else None
    if isinstance(known, type) and issubclass(known, HeadstockError):
        return known(text)
    return EngineDied(text)
