"""Rank 0: it starts the other ranks, has them run its plans, and watches over them."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

from headstock.errors import (
    CannotRun,
    EngineDied,
    HeadstockError,
    ModelError,
    PluginBroken,
    UsageError,
    describe_error,
)
from headstock.spi import Collectives, Ranks
from headstock_multiprocess.link import Link
from headstock_multiprocess.messages import (
    Alive,
    Close,
    Collected,
    Failed,
    Finished,
    FromRank,
    Message,
    Shared,
)
from headstock_multiprocess.options import MultiprocessOptions
from headstock_multiprocess.processes import RankProcess
from headstock_multiprocess.step_checks import SKEW_SECONDS, StepChecks

if TYPE_CHECKING:
    # Ranks are started before torch is imported: what needs it is imported where it is used.
    import torch

    from headstock_multiprocess.collectives import GroupCollectives

LOG = logging.getLogger("headstock.multiprocess")

_CLOSE_SECONDS = 10.0
"""How long a rank may take to free its device."""
_NEWS_SECONDS = 2.0
"""How long the end of a rank may take to be noticed after a collective has failed for it."""
_WATCH_SECONDS = 0.5


class Follower:
    """Another rank, as rank 0 sees it.

    heard_at: when its last message came, in seconds of `time.monotonic`; None before the first,
        for which it has to import its plugins
    """

    def __init__(self, index: int, process: RankProcess, link: Link[FromRank]) -> None:
        self.index = index
        self.process = process
        self.link = link
        self.values: queue.SimpleQueue[Collected | None] = queue.SimpleQueue()
        self.heard_at: float | None = None

    def __str__(self) -> str:
        return f"rank {self.index} ({self.process})"


class Leader(Ranks):
    """Rank 0 of several.   device: the setting, by which all ranks choose theirs"""

    index = 0

    def __init__(
        self,
        count: int,
        address: str,
        options: MultiprocessOptions,
        followers: Sequence[Follower],
        device: str = "auto",
    ) -> None:
        self.device = device
        self.count = count
        self.address = address
        self.options = options
        self.followers = followers
        self.failure: HeadstockError | None = None
        self.collectives: GroupCollectives | None = None
        self.ender: threading.Thread | None = None
        self.is_serving = self.closing = self.is_closed = False
        self.checks = StepChecks(count, options.patience, self._name_rank)
        # Held for `failure` and `checks`.
        self.news = threading.Condition()
        for follower in followers:
            _start_thread(self._listen, follower)
        _start_thread(self._watch)

    # Ranks

    def begin(self) -> None:
        """See `Ranks.begin`."""
        self.share([uses_gpus(self.device), self.count_threads()])

    def count_threads(self) -> int:
        """Count the threads that another rank computes with; 0 for as many as torch takes."""
        return 0

    def share(self, value: Any) -> Any:
        """See `Ranks.share`."""
        self.send(Shared(value))
        return value

    def take_least(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """See `Ranks.take_least`."""
        columns = [tuple(map(int, numbers)), *self.collect(None)]
        least = tuple(map(min, zip(*columns, strict=True)))
        self.send(Shared(least))
        return least

    def collect(self, value: Any) -> Sequence[Any]:
        """See `Ranks.collect`."""
        values = []
        for follower in self.followers:
            try:
                message = follower.values.get(timeout=self.options.patience)
            except queue.Empty:
                message = None
                self._give_up(follower)
            if message is None:
                raise self._find_failure()
            values.append(message.value)
        return values

    def join(self, device: torch.device) -> Collectives:
        """See `Ranks.join`."""
        from headstock_multiprocess.collectives import join_group

        # On a thread that can be left: a group waits for all ranks, also for one that has ended.
        joined: queue.SimpleQueue[GroupCollectives | BaseException] = queue.SimpleQueue()
        join = partial(join_group, one_gpu=self.options.one_gpu)
        _start_thread(_put_result, joined, join, self, self.address, device)
        deadline = time.monotonic() + self.options.patience
        while True:
            try:
                result = joined.get(timeout=_WATCH_SECONDS)
            except queue.Empty:
                if time.monotonic() > deadline:
                    self._give_up(self.followers[0])
                self.check()
                continue
            if isinstance(result, BaseException):
                raise result
            self.collectives = result
            return result

    def connect(self, executor: Any) -> Any:
        """See `Ranks.connect`."""
        from headstock_multiprocess.leading_executor import LeadingExecutor

        self.is_serving = True
        return LeadingExecutor(executor, self)

    def connect_masks(self, masks: Any) -> Any:
        """See `Ranks.connect_masks`."""
        from headstock_multiprocess.masks import SendingMasks

        self.share(masks is not None)
        return None if masks is None else SendingMasks(masks, self.count, self.send, self.send_each)

    def follow(self, executor: Any) -> None:
        """See `Ranks.follow`."""

    def explain(self, error: BaseException) -> BaseException:
        """See `Ranks.explain`."""
        if isinstance(error, HeadstockError):
            return error if self.failure is None else self.failure
        with self.news:
            self.news.wait_for(lambda: self.failure is not None, _NEWS_SECONDS)
        return error if self.failure is None else self.failure

    def close(self) -> None:
        """See `Ranks.close`."""
        if self.is_closed:
            return
        self.is_closed = True
        self.ask_to_end()
        deadline = time.monotonic() + _CLOSE_SECONDS
        for follower in self.followers:
            follower.process.wait(max(0.0, deadline - time.monotonic()))
            follower.link.close()

    def ask_to_end(self) -> None:
        """Have the other ranks free their devices and end; a second call does nothing."""
        if self.closing:
            return
        self.closing = True
        # Before anything waits for the device. A thread that is in CUDA when the interpreter ends
        # takes the process down.
        if self.ender is not None:
            self.ender.join(_CLOSE_SECONDS)
        for follower in self.followers:
            # One that starts would finish its imports, or the weights, before it looks.
            if self.failure is not None or not self.is_serving:
                follower.process.kill()
            send_or_drop(follower.link, Close())

    # Steps

    def send(self, message: Message) -> None:
        """Send a message to all other ranks.   raises: EngineDied"""
        self._send_all([msgspec.msgpack.encode(message)] * len(self.followers))

    def send_each(self, messages: Sequence[Message]) -> None:
        """Send a message to each other rank.   raises: EngineDied"""
        self._send_all([msgspec.msgpack.encode(message) for message in messages])

    def _send_all(self, contents: Sequence[bytes]) -> None:
        """Send an encoded message to each other rank.   raises: EngineDied"""
        for follower, content in zip(self.followers, contents, strict=True):
            try:
                follower.link.send_bytes(content)
            except OSError as error:
                raise self._find_failure() from error

    def ask(self, message: Message) -> int:
        """Send a message that asks for a step or a capture; return its number.

        raises: EngineDied
        """
        self.check()
        with self.news:
            number = self.checks.ask(time.monotonic())
        self.send(message)
        return number

    def check(self) -> None:
        """Raise EngineDied when the ranks cannot go on."""
        if self.failure is not None:
            raise self._find_failure()

    def note_done(self, number: int, result: int) -> None:
        """Rank 0 has done a step, with this result.   raises: EngineDied"""
        # No more than that: the engine's thread does it in each step, and nothing waits for it.
        with self.news:
            self.checks.report(0, number, result, "", 0.0)
            if self.checks.is_wrong:
                self._fail_for(self.checks.find_fault(time.monotonic()))
        self.check()

    def judge_failure(self, number: int, error: BaseException) -> None:
        """Raise EngineDied unless a step failed on all ranks, which go on then."""
        self._report(0, number, 0, describe_error(error))
        with self.news:
            # A little longer than the watch needs, which ends the ranks of a step that differs.
            self.news.wait_for(
                lambda: self.failure is not None or self.checks.is_over(number), 2 * SKEW_SECONDS
            )
        self.check()

    def _report(self, rank: int, number: int, result: int, error: str) -> None:
        """Note what a rank reports of a step."""
        with self.news:
            now = time.monotonic()
            self.checks.report(rank, number, result, error, now)
            self._fail_for(self.checks.find_fault(now))
            self.news.notify_all()

    def _name_rank(self, rank: int) -> str:
        """How errors name a rank."""
        return str(self.followers[rank - 1]) if rank else "rank 0"

    def _listen(self, follower: Follower) -> None:
        """Receive what a rank sends, on a thread of its own."""
        try:
            while (message := follower.link.receive()) is not None:
                follower.heard_at = time.monotonic()
                match message:
                    case Collected():
                        follower.values.put(message)
                    case Finished(number=number, result=result, error=text):
                        self._report(follower.index, number, result, text)
                    case Failed(kind=kind, text=text):
                        with self.news:
                            self._fail(_restore_error(kind, f"{follower}: {text}"))
                    case Alive():
                        pass
            end = follower.process.describe_end()
        except OSError:
            end = follower.process.describe_end()
        except (msgspec.MsgspecError, ValueError, MemoryError) as error:
            end = f"sent what is no message: {describe_error(error)}"
        with self.news:
            self._fail(EngineDied(f"{follower} {end}"))
        follower.values.put(None)

    def _watch(self) -> None:
        """End all ranks when one is silent, late or on its own, on a thread of its own.

        A collective waits for it, which no other thread of this process could end.
        """
        silence = self.options.silence
        while not self.closing and self.failure is None:
            now = time.monotonic()
            with self.news:
                self._fail_for(self.checks.find_fault(now))
                for follower in self.followers:
                    if follower.heard_at is not None and now - follower.heard_at > silence:
                        self._fail_for(
                            f"{follower} gave no sign of life for {silence:g} s; it is stopped, or "
                            "its machine is overloaded"
                        )
            time.sleep(_WATCH_SECONDS)

    def _fail_for(self, fault: str) -> None:
        """Fail for a fault that is not empty; `news` is held."""
        if fault:
            self._fail(EngineDied(fault))

    def _give_up(self, follower: Follower) -> None:
        """Fail because a rank is not ready long after rank 0."""
        seconds = f"{self.options.patience:g} s"
        with self.news:
            self._fail(EngineDied(f"{follower} has not started {seconds} after rank 0"))

    def _fail(self, error: HeadstockError) -> None:
        """Note the first failure, and end all other ranks; `news` is held.

        A rank that waits for one that has gone cannot be asked to end.
        """
        if self.failure is None and not self.closing:
            self.failure = error
            for follower in self.followers:
                follower.process.kill()
            if self.collectives is not None:
                self.ender = _start_thread(_end_waits, self.collectives)
        self.news.notify_all()

    def _find_failure(self) -> HeadstockError:
        """Find out why a rank cannot be reached."""
        with self.news:
            self.news.wait_for(lambda: self.failure is not None, _NEWS_SECONDS)
        found = self.failure or EngineDied("the ranks are closed")
        return type(found)(*found.args)


def uses_gpus(device: str) -> bool:
    """Whether ranks compute on GPUs.   device: the setting"""
    import torch

    return device != "cpu" and torch.cuda.is_available()


def _end_waits(collectives: GroupCollectives) -> None:
    """Have what waits for a rank on this one's device end."""
    collectives.abandon()
    collectives.abort()


def _start_thread(function: Callable[..., None], *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=arguments, daemon=True, name="headstock-ranks")
    thread.start()
    return thread


def _put_result(
    results: queue.SimpleQueue[Any], function: Callable[..., Any], *arguments: Any
) -> None:
    """Put what a function returns, or raises, into a queue."""
    try:
        results.put(function(*arguments))
    except BaseException as error:
        results.put(error)


def send_or_drop(link: Link[FromRank], message: Message) -> None:
    """Send a message to a rank that may have ended."""
    try:
        link.send(message)
    except OSError:
        return  # its listener says how it ended


_KINDS: Mapping[str, type[HeadstockError]] = MappingProxyType(
    {kind.__name__: kind for kind in (CannotRun, ModelError, PluginBroken, UsageError)}
)
"""The errors that a rank may meet as it starts, by name."""


def _restore_error(kind: str, text: str) -> HeadstockError:
    """The error that a rank has met."""
    return _KINDS.get(kind, EngineDied)(text)
