"""Another rank than 0: it builds its part of the model and runs the plans that it receives."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
import torch

from headstock.errors import PLUGIN_FAILURES, CannotRun, EngineDied, HeadstockError, describe_error
from headstock.execution import abstract_executor
from headstock.logs import log_event, show_library_logs, show_logs
from headstock.spi import Collectives, Ranks
from headstock.startup import build
from headstock_multiprocess.collectives import join_group
from headstock_multiprocess.link import Link
from headstock_multiprocess.masks import ReceivingMasks
from headstock_multiprocess.messages import (
    Alive,
    Close,
    Collected,
    Execute,
    Failed,
    Finished,
    Message,
    PrepareNext,
    Shared,
    Start,
    ToRank,
    digest_sample,
    read_execute,
)
from headstock_multiprocess.rendezvous import Placement, connect_to_leader

LOG = logging.getLogger("headstock.multiprocess")

_Wanted = TypeVar("_Wanted", bound=Message)

_ALIVE_SECONDS = 1.0
_LOST_SECONDS = 3.0
"""How long a rank without rank 0 may take to end by itself; a collective may never return."""
_CLOSE_SECONDS = 30.0
"""How long it may take when rank 0 has asked it to end."""
_POLL_SECONDS = 0.01
"""How often a rank with a step on the device looks whether it is done."""


class Unexpected(Exception):
    """Rank 0 has given up the step that this rank is in."""


class FollowingRanks(Ranks):
    """The ranks as one sees them that follows rank 0."""

    def __init__(self, start: Start, link: Link[ToRank]) -> None:
        self.index, self.count = start.index, start.count
        self.address, self.one_gpu = start.address, start.one_gpu
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

    def begin(self) -> None:
        """See `Ranks.begin`."""
        on_gpu, threads = self.share(None)
        if on_gpu:
            # The GPU of this rank among those of its machine.
            own = 0 if self.one_gpu else int(os.environ.get("LOCAL_RANK", self.index))
            torch.cuda.set_device(own)
        if threads and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(threads)

    def share(self, value: Any) -> Any:
        """See `Ranks.share`."""
        return self.expect(Shared).value

    def take_least(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """See `Ranks.take_least`."""
        self.collect(tuple(map(int, numbers)))
        return tuple(self.expect(Shared).value)

    def collect(self, value: Any) -> Sequence[Any]:
        """See `Ranks.collect`."""
        self.link.send(Collected(value))
        return ()

    def join(self, device: torch.device) -> Collectives:
        """See `Ranks.join`."""
        return join_group(self, self.address, device, one_gpu=self.one_gpu)

    def connect(self, executor: Any) -> Any:
        """See `Ranks.connect`."""
        return executor

    def connect_masks(self, masks: Any) -> Any:
        """See `Ranks.connect_masks`."""
        return ReceivingMasks(self.expect) if self.share(None) else None

    def explain(self, error: BaseException) -> BaseException:
        """See `Ranks.explain`."""
        # Rank 0 says so, unless it is the one that has gone.
        if isinstance(error, Exception) and not isinstance(error, OSError):
            kind = type(error).__name__ if isinstance(error, HeadstockError) else "EngineDied"
            text = str(error) if isinstance(error, HeadstockError) else describe_error(error)
            with contextlib.suppress(OSError):
                self.link.send(Failed(kind, text))
        return error

    def follow(self, executor: Any) -> None:
        """See `Ranks.follow`."""
        gc.collect()
        gc.freeze()
        gc.enable()
        try:
            follow(self, executor)
        except OSError:  # rank 0 has gone
            LOG.error(log_event("rank 0 has gone", rank=self.index))

    def close(self) -> None:
        """See `Ranks.close`; rank 0 ends the others."""

    def _listen(self) -> None:
        """Receive messages, on a thread of its own."""
        seconds = _LOST_SECONDS
        try:
            while (message := self.link.receive()) is not None:
                if isinstance(message, Close):
                    seconds = _CLOSE_SECONDS
                self.inbox.put(message)
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            LOG.error(log_event("the messages of rank 0 end", reason=describe_error(error)))
        self.inbox.put(None)
        time.sleep(seconds)
        os._exit(EngineDied.exit_code)

    def _give_signs(self) -> None:
        """Tell rank 0 that this process lives, on a thread of its own."""
        while True:
            time.sleep(_ALIVE_SECONDS)
            try:
                self.link.send(Alive())
            except OSError:
                return


class _Steps:
    """The steps of a rank, whose ends it reports in their order."""

    def __init__(self, ranks: FollowingRanks) -> None:
        self.ranks = ranks
        self.number = 0
        self.pending: deque[tuple[int, abstract_executor.Pending]] = deque()

    def launch(self, step: Callable[[], abstract_executor.Pending | int]) -> None:
        """Launch a step, or do what is over when it returns its result."""
        self.number += 1
        try:
            pending = step()
        except PLUGIN_FAILURES as error:
            self.finish(0)
            self._report(self.number, 0, error)
            return
        if isinstance(pending, int):
            self.finish(0)
            self._report(self.number, pending, None)
            return
        self.pending.append((self.number, pending))

    def finish(self, most: int) -> None:
        """Wait for the oldest steps until at most so many are left, or those are not done."""
        while self.pending and (len(self.pending) > most or self.pending[0][1].is_done):
            number, pending = self.pending.popleft()
            try:
                result = digest_sample(pending.wait())
            except PLUGIN_FAILURES as error:
                self._report(number, 0, error)
            else:
                self._report(number, result, None)

    def _report(self, number: int, result: int, error: BaseException | None) -> None:
        """Tell rank 0 that a step is over."""
        if error is not None:
            LOG.error(log_event("step failed", rank=self.ranks.index), exc_info=error)
        text = "" if error is None else describe_error(error)
        self.ranks.link.send(Finished(number, result, text))


def follow(ranks: FollowingRanks, executor: abstract_executor.Executor) -> None:
    """Run rank 0's plans until it closes or goes.   raises: OSError"""
    steps = _Steps(ranks)

    def execute(message: Execute) -> abstract_executor.Pending:
        return executor.execute(*read_execute(message))

    while True:
        # With overlap a step is launched while the one before runs, as on rank 0.
        steps.finish(1)
        try:
            message = ranks.receive(_POLL_SECONDS if steps.pending else None)
        except queue.Empty:
            continue
        match message:
            case Execute():
                steps.launch(partial(execute, message))
            case PrepareNext():
                steps.launch(executor.prepare_next)
            case None | Close():
                return
            case _:
                # Of a step that has failed here before it was asked for.
                LOG.debug(log_event("a message was dropped", kind=type(message).__name__))


def connect_rank(place: Placement, patience: float) -> FollowingRanks:
    """Connect a rank that something else has started to rank 0.   raises: CannotRun"""
    return follow_connection(connect_to_leader(place, patience), place)


def follow_connection(connection: socket.socket, place: Placement) -> FollowingRanks:
    """The ranks as one sees them that is connected to rank 0.   raises: CannotRun"""
    link: Link[ToRank] = Link(connection, ToRank)
    start = link.receive()
    if not isinstance(start, Start):
        raise CannotRun(f"rank 0 at {place.address} has ended; its log says why")
    return FollowingRanks(start, link)


def run_follower(start: Start, link: Link[ToRank]) -> int:
    """Follow rank 0 to its end, and return the exit code of this process."""
    show_logs(start.log_level)
    show_library_logs()
    try:
        build.run_rank(FollowingRanks(start, link))
    except HeadstockError as error:
        return error.exit_code
    except OSError:  # rank 0 has gone
        return EngineDied.exit_code
    except Exception as error:
        LOG.error(log_event("a rank ended", rank=start.index), exc_info=error)
        return EngineDied.exit_code
    return 0
