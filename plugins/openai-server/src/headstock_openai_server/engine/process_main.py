"""The engine process: an engine, its loop, and one socket to the process that started it.

Run as `python -m headstock_openai_server.engine.process_main FD`. It ends when the other end of the
socket closes, so no engine outlives its server.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from headstock import CapacityError, EngineConfig, EngineDied, HeadstockError, RequestError
from headstock.errors import describe_error
from headstock.logs import log_event, show_library_logs, show_logs
from headstock.outputs import Update
from headstock.requests import EngineLoop, StartedEngine, start_engine
from headstock.scheduler import find_refusal
from headstock_openai_server.engine.channel import Channel
from headstock_openai_server.engine.grammar_queue import GrammarQueue
from headstock_openai_server.engine.messages import (
    Abort,
    Accepted,
    Close,
    Failed,
    FromEngine,
    Inspect,
    Ready,
    Refused,
    ResetPrefixCache,
    Start,
    StartProgress,
    Stats,
    Step,
    Submit,
    WireUpdate,
    pack_update,
    record_fields,
    unpack_requests,
)
from headstock_openai_server.engine.snapshot import take_snapshot

LOG = logging.getLogger("headstock.serve")

STATS_SECONDS = 0.25
"""How often a busy engine reports its counts."""
PROGRESS_SECONDS = 0.1
"""How often a stage of the start reports how far it is."""
EXIT_SECONDS = 20
"""Seconds that freeing the device may take before the process exits anyway."""


class StepReporter:
    """Sends a step's tokens in one message and its ends in another; sinks only append.

    It is only called on the engine's thread.
    """

    # One message per row costs the reader three times as much: the wake-up is expensive, not the
    # bytes.

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.updates: list[WireUpdate] = []
        self.engine: StartedEngine | None = None
        self.loop: EngineLoop | None = None
        self.stats_due = 0.0
        # Set by the receiving thread, cleared by the engine's thread.
        self.wants_snapshot = False

    def add_update(self, update: Update) -> None:
        """Add an update; the sink of every request."""
        self.updates.append(pack_update(update))

    def send_step(self) -> None:
        """Send the updates of the sinks and, now and then, the engine's counts."""
        updates, self.updates = self.updates, []
        loop = self.loop
        try:
            # Before the updates, which end requests for this reason. The server then closes.
            failure = None if loop is None else find_failure(loop)
            if failure is not None:
                self.channel.send(Failed("EngineDied", str(failure)))
            if updates:
                self.channel.send(Step(updates))
            if self.engine is None or loop is None or failure is not None:
                return
            now = time.monotonic()
            if now >= self.stats_due or not self.engine.has_work:
                self.stats_due = now + STATS_SECONDS
                counts = record_fields(self.engine.stats())
                self.channel.send(Stats({name: int(count) for name, count in counts.items()}))
            if self.wants_snapshot:
                # Late: it imports torch, which the processes of other ranks do meanwhile.
                from headstock.engine import engine as core_engine

                if isinstance(self.engine, core_engine.Engine):
                    self.wants_snapshot = False
                    self.channel.send(take_snapshot(self.engine.state, self.engine.limits))
        except OSError:  # the server has exited, which the receiving thread sees too
            pass


def find_failure(loop: EngineLoop) -> BaseException | None:
    """Why the loop has stopped; None while it serves requests."""
    try:
        loop.check_alive()
    except EngineDied as error:
        return error.__cause__ or error
    return None


class ProgressReporter:
    """Sends the progress of the start a few times a second."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.next_report = 0.0
        self.stage = ""

    def __call__(self, stage: str, completed: int, total: int) -> None:
        now = time.monotonic()
        if stage != self.stage or completed >= total or now >= self.next_report:
            self.stage, self.next_report = stage, now + PROGRESS_SECONDS
            self.channel.send(StartProgress(stage, completed, total))


def main(
    arguments: list[str], start_engine: Callable[..., tuple[Any, EngineLoop]] = start_engine
) -> int:
    """Serve the engine on the socket with the file descriptor ARGUMENTS[0]; the exit code."""
    # The server decides when the engine ends: it drains first. A terminal sends Ctrl-C to both, and
    # a service manager SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=int(arguments[0])))
    start = channel.receive()
    if not isinstance(start, Start):
        return EngineDied.exit_code
    show_logs(start.log_level, least=start.least_level)
    show_library_logs()
    reporter = StepReporter(channel)
    # Imports create objects that live as long as the process: looking for garbage in them takes
    # a tenth of the imports' time.
    gc.disable()
    try:
        try:
            engine, loop = start_engine(
                make_config(start), ProgressReporter(channel), reporter.send_step
            )
        except HeadstockError as error:
            channel.send(Failed(type(error).__name__, str(error)))
            return error.exit_code
        except Exception as error:
            LOG.error(log_event("the engine did not start"), exc_info=error)
            channel.send(Failed("EngineDied", f"internal error: {describe_error(error)}"))
            return EngineDied.exit_code
        # A full collection visits everything that torch and transformers define: 200 ms in which no
        # step begins. These objects live to the end, so later collections can skip them.
        gc.collect()
        gc.freeze()
        gc.enable()
        return serve_engine(channel, engine, loop, reporter)
    except OSError:  # the server has exited
        return EngineDied.exit_code


def make_config(start: Start) -> EngineConfig:
    """The configuration that the server resolved."""
    # The settings have tuples, which msgpack lacks.
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in start.config.items()
    }
    return EngineConfig(**values)


def serve_engine(
    channel: Channel, engine: StartedEngine, loop: EngineLoop, reporter: StepReporter
) -> int:
    """Handle messages until the server ends; return the exit code.   raises: OSError"""
    channel.send(
        Ready(
            str(engine.directory),
            engine.model.vocab,
            engine.max_seq_len,
            engine.length_hint,
            engine.eos_ids,
            record_fields(engine.summary),
        )
    )
    reporter.engine, reporter.loop = engine, loop
    grammars = GrammarQueue(channel.send, loop)
    while True:
        message = channel.receive()
        match message:
            case None | Close():
                break
            case Submit() if grammars.must_compile(message, engine):
                grammars.submit(message, partial(submit_batch, message, engine, loop, reporter))
            case Submit():
                channel.send(submit_batch(message, engine, loop, reporter))
            case Abort(ids=ids):
                grammars.note_aborts(ids)
                for request_id in ids:
                    loop.abort(request_id)
            case ResetPrefixCache():
                with contextlib.suppress(EngineDied):
                    loop.reset_prefix_cache()
            case Inspect():
                reporter.wants_snapshot = True
            case Start():
                LOG.error(log_event("a message was dropped", reason="the engine runs already"))
    reporter.loop = None  # from here on the end of the loop is not a failure
    # A thread in C exits the process if a device hangs, even if another thread holds the GIL.
    faulthandler.dump_traceback_later(EXIT_SECONDS, exit=True)
    code = 0 if find_failure(loop) is None else EngineDied.exit_code
    loop.close()
    engine.close()
    grammars.close()
    return code


def submit_batch(
    message: Submit, engine: Any, loop: EngineLoop, reporter: StepReporter
) -> FromEngine:
    """The answer to a batch: all of its requests are queued, or none."""
    submitted: list[str] = []
    try:
        for request in unpack_requests(message):
            loop.submit(request, reporter.add_update, stream_tokens=message.stream_tokens)
            submitted.append(request.id)
    except (RequestError, EngineDied) as error:
        for request_id in submitted:
            loop.abort(request_id)
        is_full = isinstance(error, CapacityError)
        return Refused(
            message.batch,
            str(error),
            getattr(error, "parameter", None),
            capacity=is_full,
            # The same error whether a request never fits or does not fit now.
            retry=is_full and find_refusal(request, engine.limits) is None,
        )
    return Accepted(message.batch)


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    logging.shutdown()
    # Not sys.exit: everything is closed, and tearing down torch would take half a second.
    os._exit(exit_code)
