"""Another rank than 0: it builds its part of the model and runs the plans that it receives.

Run as `python -m headstock_multiprocess.follower FD`. It ends when the other end of the socket
closes, so that no rank outlives rank 0.
"""

from __future__ import annotations

import gc
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
import torch

from headstock.config import EngineConfig
from headstock.errors import PLUGIN_FAILURES, EngineDied, HeadstockError, describe_error
from headstock.execution import abstract_executor
from headstock.logs import log_event, show_logs
from headstock.spi import Collectives, Ranks
from headstock.startup import build
from headstock_multiprocess.collectives import join_group
from headstock_multiprocess.link import Link
from headstock_multiprocess.masks import ReceivingMasks
from headstock_multiprocess.messages import (
    Alive,
    Close,
    Execute,
    Failed,
    Finished,
    Message,
    Numbers,
    PrepareNext,
    Shared,
    Start,
    ToRank,
    read_execute,
)

LOG = logging.getLogger("headstock.multiprocess")

_Wanted = TypeVar("_Wanted", bound=Message)

_ALIVE_SECONDS = 1.0
_EXIT_SECONDS = 3.0
"""How long a rank without rank 0 may take to end by itself; a collective may never return."""
_POLL_SECONDS = 0.01
"""How often a rank with a step on the device looks whether it is done."""


class Unexpected(Exception):
    """Rank 0 has given up the step that this rank is in."""


class FollowingRanks(Ranks):
    """The ranks as one sees them that follows rank 0."""

    def __init__(self, start: Start, link: Link[ToRank]) -> None:
        self.index, self.count = start.index, start.count
        self.address = start.address
        self.link = link
        self.inbox: queue.SimpleQueue[ToRank | None] = queue.SimpleQueue()
        self.held: deque[ToRank | None] = deque()
        for function in (self._listen, self._give_signs):
            threading.Thread(target=function, daemon=True).start()

    def receive(self, timeout: float | None = None) -> ToRank | None:
        """Return the next message; None once rank 0 has gone.   raises: queue.Empty"""
        return self.held.popleft() if self.held else self.inbox.get(timeout=timeout)

    def expect(self, kind: type[_Wanted]) -> _Wanted:
        """Return the next message, which is of this type.

        raises: Unexpected; ConnectionAbortedError when rank 0 closes or goes
        """
        message = self.receive()
        if message is None or isinstance(message, Close):
            raise ConnectionAbortedError("rank 0 has closed")
        if not isinstance(message, kind):
            self.held.append(message)
            raise Unexpected(f"expected {kind.__name__}, got {type(message).__name__}")
        return message

    def share(self, value: Any) -> Any:
        """See `Ranks.share`."""
        return self.expect(Shared).value

    def take_least(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """See `Ranks.take_least`."""
        self.link.send(Numbers(tuple(map(int, numbers))))
        return tuple(self.expect(Shared).value)

    def join(self, device: torch.device) -> Collectives:
        """See `Ranks.join`."""
        return join_group(self.index, self.count, self.address, device, self.share)

    def connect(self, executor: Any) -> Any:
        """See `Ranks.connect`."""
        return executor

    def connect_masks(self, masks: Any) -> Any:
        """See `Ranks.connect_masks`."""
        return ReceivingMasks(self.expect) if self.share(None) else None

    def explain(self, error: BaseException) -> BaseException:
        """See `Ranks.explain`."""
        return error

    def close(self) -> None:
        """See `Ranks.close`; rank 0 ends the others."""

    def _listen(self) -> None:
        """Receive messages, on a thread of its own."""
        try:
            while (message := self.link.receive()) is not None:
                self.inbox.put(message)
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            LOG.error(log_event("the messages of rank 0 end", reason=describe_error(error)))
        self.inbox.put(None)
        time.sleep(_EXIT_SECONDS)
        os._exit(EngineDied.exit_code)

    def _give_signs(self) -> None:
        """Tell rank 0 that this process lives, on a thread of its own."""
        while True:
            time.sleep(_ALIVE_SECONDS)
            try:
                self.link.send(Alive())
            except OSError:
                return


def follow(ranks: FollowingRanks, executor: abstract_executor.Executor) -> None:
    """Run rank 0's plans until it closes or goes."""
    pending: deque[tuple[int, abstract_executor.Pending]] = deque()
    number = 0
    while True:
        try:
            message = ranks.receive(_POLL_SECONDS if pending else None)
        except queue.Empty:
            if pending[0][1].is_done:
                _finish(ranks, *pending.popleft())
            continue
        # With overlap a step is launched while the one before runs, as on rank 0.
        while pending and (len(pending) > 1 or pending[0][1].is_done):
            _finish(ranks, *pending.popleft())
        match message:
            case Execute():
                number += 1
                try:
                    pending.append((number, executor.execute(*read_execute(message))))
                except PLUGIN_FAILURES as error:
                    _report(ranks, number, error)
            case PrepareNext():
                number += 1
                try:
                    executor.prepare_next()
                    _report(ranks, number, None)
                except PLUGIN_FAILURES as error:
                    _report(ranks, number, error)
            case None | Close():
                return
            case _:
                # Of a step that has failed here before it was asked for.
                LOG.debug(log_event("a message was dropped", kind=type(message).__name__))


def _finish(ranks: FollowingRanks, number: int, pending: abstract_executor.Pending) -> None:
    """Wait for a step, and report it."""
    try:
        pending.wait()
    except PLUGIN_FAILURES as error:
        _report(ranks, number, error)
        return
    _report(ranks, number, None)


def _report(ranks: FollowingRanks, number: int, error: BaseException | None) -> None:
    """Tell rank 0 that a step is over."""
    if error is not None:
        LOG.error(log_event("step failed", rank=ranks.index), exc_info=error)
    ranks.link.send(Finished(number, "" if error is None else describe_error(error)))


def make_config(values: dict[str, Any]) -> EngineConfig:
    """The configuration of rank 0."""
    # msgpack has no tuples, of which the settings are made.
    tuples: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }
    return EngineConfig(**tuples)


def main(arguments: list[str]) -> int:
    """Follow rank 0 on the socket with the file descriptor ARGUMENTS[0]; return the exit code."""
    # Rank 0 decides when the others end. A terminal sends Ctrl-C to all.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    link: Link[ToRank] = Link(socket.socket(fileno=int(arguments[0])), ToRank)
    start = link.receive()
    if not isinstance(start, Start):
        return EngineDied.exit_code
    show_logs(start.log_level)
    ranks = FollowingRanks(start, link)
    try:
        try:
            config = make_config(start.config)
            if config.device != "cpu" and torch.cuda.is_available():
                torch.cuda.set_device(start.index)
            executor = build.build_engine(config, ranks=ranks).executor
        except HeadstockError as error:
            link.send(Failed(type(error).__name__, str(error)))
            return error.exit_code
        except Exception as error:
            LOG.error(log_event("a rank did not start", rank=start.index), exc_info=error)
            link.send(Failed("EngineDied", describe_error(error)))
            return EngineDied.exit_code
        gc.collect()
        gc.freeze()
        follow(ranks, executor)
        executor.close()
        return 0
    except OSError:  # rank 0 has gone
        return EngineDied.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
