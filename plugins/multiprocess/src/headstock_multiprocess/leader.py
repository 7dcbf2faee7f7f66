"""Rank 0: it starts the other ranks, has them run its plans, and watches over them."""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
import torch

from headstock.config import EngineConfig
from headstock.errors import (
    PLUGIN_FAILURES,
    CannotRun,
    EngineDied,
    HeadstockError,
    ModelError,
    PluginBroken,
    UsageError,
    describe_error,
)
from headstock.execution import abstract_executor
from headstock.scheduler import Plan, RequestState
from headstock.spi import Collectives, Ranks, Sample
from headstock_multiprocess.collectives import join_group
from headstock_multiprocess.follower import connect_rank
from headstock_multiprocess.link import Link
from headstock_multiprocess.masks import SendingMasks
from headstock_multiprocess.messages import (
    Alive,
    Close,
    Failed,
    Finished,
    FromRank,
    Message,
    Numbers,
    PrepareNext,
    Shared,
    Start,
    make_execute,
)
from headstock_multiprocess.options import MultiprocessOptions
from headstock_multiprocess.rendezvous import accept_ranks, read_placement

LOG = logging.getLogger("headstock.multiprocess")

_LOCAL = "127.0.0.1"
_CLOSE_SECONDS = 10.0
"""How long a rank may take to free its device."""
_NEWS_SECONDS = 2.0
"""How long the end of a rank may take to be noticed after a collective has failed for it."""
_WATCH_SECONDS = 0.5
_SKEW_SECONDS = 5.0
"""How much later a step may fail on one rank than on another; else it failed there alone."""


class LocalProcess:
    """A process that rank 0 has started."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    def __str__(self) -> str:
        return f"process {self.process.pid}"

    def kill(self) -> None:
        """End the process at once."""
        self.process.kill()

    def wait(self, seconds: float) -> None:
        """Wait for the process to end, which is killed after these seconds."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def describe_end(self) -> str:
        """Say how the process has ended."""
        try:
            code = self.process.wait(_NEWS_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"


class RemoteProcess:
    """A process that something else has started, maybe on another machine."""

    def __init__(self, link: Link[FromRank]) -> None:
        self.link = link
        self.place = link.describe_peer()

    def __str__(self) -> str:
        return f"at {self.place}"

    def kill(self) -> None:
        """Close the connection, which has the process end by itself."""
        self.link.close()

    def wait(self, seconds: float) -> None:
        """Its end cannot be waited for."""

    def describe_end(self) -> str:
        """Say how the process has ended."""
        return "closed its connection"


class Follower:
    """Another rank, as rank 0 sees it.

    heard_at: when its last message came, in seconds of `time.monotonic`; None before the first,
        for which it has to import its plugins
    finished: the number of the last step that it has done
    """

    def __init__(
        self, index: int, process: LocalProcess | RemoteProcess, link: Link[FromRank]
    ) -> None:
        self.index = index
        self.process = process
        self.link = link
        self.numbers: queue.SimpleQueue[tuple[int, ...] | None] = queue.SimpleQueue()
        self.heard_at: float | None = None
        self.finished = 0

    def __str__(self) -> str:
        return f"rank {self.index} ({self.process})"


class Leader(Ranks):
    """Rank 0 of several."""

    index = 0

    def __init__(
        self,
        count: int,
        address: str,
        options: MultiprocessOptions,
        followers: Sequence[Follower],
    ) -> None:
        self.count = count
        self.address = address
        self.options = options
        self.followers = followers
        self.failure: HeadstockError | None = None
        self.closing = False
        self.num_asked = 0
        # By step that rank 0 has yet to do: when it was asked for.
        self.asked_at: dict[int, float] = {}
        # By step: whether rank 0 has done it. Of steps that some rank has still to do.
        self.outcomes: dict[int, bool] = {}
        self.failed_steps: list[tuple[Follower, int, str]] = []
        self.news = threading.Condition()
        for follower in followers:
            _start_thread(self._listen, follower)
        _start_thread(_watch, weakref.ref(self))

    # Ranks

    def share(self, value: Any) -> Any:
        """See `Ranks.share`."""
        self.send(Shared(value))
        return value

    def take_least(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """See `Ranks.take_least`."""
        columns = [tuple(map(int, numbers))]
        for follower in self.followers:
            try:
                values = follower.numbers.get(timeout=self.options.patience)
            except queue.Empty:
                values = None
                self._give_up(follower)
            if values is None:
                raise self._find_failure()
            columns.append(values)
        least = tuple(map(min, zip(*columns, strict=True)))
        self.send(Shared(least))
        return least

    def join(self, device: torch.device) -> Collectives:
        """See `Ranks.join`."""
        # On a thread that can be left: a group waits for all ranks, also for one that has ended.
        joined: queue.SimpleQueue[Collectives | BaseException] = queue.SimpleQueue()
        _start_thread(_put_result, joined, join_group, self, self.address, device)
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
            return result

    def connect(self, executor: Any) -> Any:
        """See `Ranks.connect`."""
        return LeadingExecutor(executor, self)

    def connect_masks(self, masks: Any) -> Any:
        """See `Ranks.connect_masks`."""
        self.share(masks is not None)
        return None if masks is None else SendingMasks(masks, self.send)

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
        if self.closing:
            return
        self.closing = True
        deadline = time.monotonic() + _CLOSE_SECONDS
        for follower in self.followers:
            if self.failure is not None:
                follower.process.kill()
            _send_or_drop(follower.link, Close())
        for follower in self.followers:
            follower.process.wait(max(0.0, deadline - time.monotonic()))
            follower.link.close()

    # Steps

    def send(self, message: Message) -> None:
        """Send a message to all other ranks.   raises: EngineDied"""
        content = msgspec.msgpack.encode(message)
        for follower in self.followers:
            try:
                follower.link.send_bytes(content)
            except OSError as error:
                raise self._find_failure() from error

    def ask(self, message: Message) -> int:
        """Send a message that asks for a step or a capture; return its number.

        raises: EngineDied
        """
        self.check()
        self.num_asked += 1
        with self.news:
            self.asked_at[self.num_asked] = time.monotonic()
        self.send(message)
        return self.num_asked

    def check(self) -> None:
        """Raise EngineDied when a rank has failed, or did not do what rank 0 has done."""
        with self.news:
            reports, self.failed_steps = self.failed_steps, []
            for report in reports:
                follower, number, text = report
                if self.outcomes.get(number):
                    self._fail(EngineDied(f"{follower} failed in a step: {text}"))
                elif number not in self.outcomes:
                    self.failed_steps.append(report)
            done = min(follower.finished for follower in self.followers)
            for number in [each for each in self.outcomes if each <= done]:
                del self.outcomes[number]
        if self.failure is not None:
            raise self._find_failure()

    def note_done(self, number: int) -> None:
        """Rank 0 has done a step.   raises: EngineDied"""
        with self.news:
            self.outcomes[number] = True
            self.asked_at.pop(number, None)
        self.check()

    def judge_failure(self, number: int, error: BaseException) -> None:
        """Raise EngineDied unless a step failed on all ranks, which go on then."""
        with self.news:
            self.outcomes[number] = False
            self.asked_at.pop(number, None)
            self.news.wait_for(
                lambda: (
                    self.failure is not None
                    or all(each.finished >= number for each in self.followers)
                ),
                _SKEW_SECONDS,
            )
            failed = {each.index for each, at, _ in self.failed_steps if at == number}
            if self.failure is None and len(failed) < len(self.followers):
                self._fail(EngineDied(f"rank 0 failed in a step: {describe_error(error)}"))
        self.check()

    def find_failed(self) -> str:
        """Describe a step that failed on another rank, and which rank 0 has not done; or ""."""
        for follower, number, text in self.failed_steps:
            if number not in self.outcomes:
                return f"{follower} failed in a step: {text}"
        return ""

    def find_late(self) -> Follower | None:
        """Find a rank that has not done a step long after rank 0 has."""
        done = max((number for number, is_done in self.outcomes.items() if is_done), default=0)
        return next((each for each in self.followers if each.finished < done), None)

    def _listen(self, follower: Follower) -> None:
        """Receive what a rank sends, on a thread of its own."""
        try:
            while (message := follower.link.receive()) is not None:
                follower.heard_at = time.monotonic()
                match message:
                    case Numbers(values=values):
                        follower.numbers.put(values)
                    case Finished(number=number, error=text):
                        with self.news:
                            follower.finished = number
                            if text:
                                self.failed_steps.append((follower, number, text))
                            self.news.notify_all()
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
        follower.numbers.put(None)

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
        self.news.notify_all()

    def _find_failure(self) -> HeadstockError:
        """Find out why a rank cannot be reached."""
        with self.news:
            self.news.wait_for(lambda: self.failure is not None, _NEWS_SECONDS)
        found = self.failure or EngineDied("the ranks are closed")
        return type(found)(*found.args)


class LeadingExecutor(abstract_executor.Executor):
    """Has the other ranks run its plans too."""

    def __init__(self, inner: abstract_executor.Executor, ranks: Leader) -> None:
        self.inner = inner
        self.ranks = ranks

    def execute(
        self, plan: Plan, new_rows: Mapping[int, RequestState]
    ) -> abstract_executor.Pending:
        """See `Executor.execute`.   raises: EngineDied"""
        number = self.ranks.ask(make_execute(plan, new_rows))
        try:
            pending = self.inner.execute(plan, new_rows)
        except PLUGIN_FAILURES as error:
            self.ranks.judge_failure(number, error)
            raise
        return LedStep(pending, self.ranks, number)

    def check_alive(self) -> None:
        """See `Executor.check_alive`."""
        self.ranks.check()

    def prepare_next(self) -> int:
        """See `Executor.prepare_next`."""
        number = self.ranks.ask(PrepareNext())
        try:
            left = self.inner.prepare_next()
        except PLUGIN_FAILURES as error:
            self.ranks.judge_failure(number, error)
            raise
        self.ranks.note_done(number)
        return left

    def close(self) -> None:
        """See `Executor.close`."""
        try:
            self.ranks.close()
        finally:
            self.inner.close()


class LedStep(abstract_executor.Pending):
    """A step that all ranks run."""

    def __init__(self, inner: abstract_executor.Pending, ranks: Leader, number: int) -> None:
        self.inner = inner
        self.ranks = ranks
        self.number = number

    @property
    def is_done(self) -> bool:
        """See `Pending.is_done`."""
        return self.inner.is_done

    def wait(self) -> Sample:
        """See `Pending.wait`.   raises: EngineDied when the ranks disagree"""
        try:
            sample = self.inner.wait()
        except PLUGIN_FAILURES as error:
            self.ranks.judge_failure(self.number, error)
            raise
        self.is_replayed, self.reasons = self.inner.is_replayed, self.inner.reasons
        self.ranks.note_done(self.number)
        return sample


def start_ranks(config: EngineConfig, options: MultiprocessOptions) -> Ranks:
    """Start a process on this machine for each rank but the first, where nothing else has.

    Under torchrun, or what sets the same variables, this process may be another rank than 0.

    raises: UsageError, CannotRun
    """
    place = read_placement(os.environ, config.tp)
    if place is None:
        return _start_local_ranks(config, options)
    if place.index:
        return connect_rank(place, options.patience)
    links = {
        index: Link[FromRank](connection, FromRank)
        for index, connection in accept_ranks(place, options.patience).items()
    }
    followers = [Follower(index, RemoteProcess(link), link) for index, link in links.items()]
    leader = Leader(config.tp, place.address, options, followers)
    return _begin(leader, on_gpu=_uses_gpus(config))


def _start_local_ranks(config: EngineConfig, options: MultiprocessOptions) -> Leader:
    """Start a process on this machine for each rank but the first.   raises: CannotRun"""
    on_gpu = _uses_gpus(config)
    if on_gpu and torch.cuda.device_count() < config.tp:
        raise CannotRun(
            f"tp (--tp) {config.tp}: expected as many GPUs, got {torch.cuda.device_count()}; "
            "lower it, or check CUDA_VISIBLE_DEVICES"
        )
    followers = []
    for index in range(1, config.tp):
        process, link = _start_process(config.tp)
        followers.append(Follower(index, LocalProcess(process), link))
    return _begin(Leader(config.tp, _LOCAL, options, followers), on_gpu=on_gpu)


def _uses_gpus(config: EngineConfig) -> bool:
    """Whether the ranks compute on GPUs."""
    return config.device != "cpu" and torch.cuda.is_available()


def _begin(leader: Leader, *, on_gpu: bool) -> Leader:
    """Tell each other rank which one it is."""
    level = logging.getLevelName(LOG.getEffectiveLevel())
    for follower in leader.followers:
        start = Start(follower.index, leader.count, leader.address, on_gpu, level)
        _send_or_drop(follower.link, start)
    return leader


def _start_process(count: int) -> tuple[subprocess.Popen[bytes], Link[FromRank]]:
    """Start the process of a rank, and connect to it."""
    ours, theirs = socket.socketpair()
    threads = str(max(1, torch.get_num_threads() // count))
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "headstock_multiprocess.follower", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            # What a plugin prints must not get between the lines of an answer.
            stdout=2,
            env={"OMP_NUM_THREADS": threads} | os.environ,
        )
    return process, Link(ours, FromRank)


def _start_thread(function: Callable[..., None], *arguments: Any) -> None:
    threading.Thread(target=function, args=arguments, daemon=True, name="headstock-ranks").start()


def _put_result(
    results: queue.SimpleQueue[Any], function: Callable[..., Any], *arguments: Any
) -> None:
    """Put what a function returns, or raises, into a queue."""
    try:
        results.put(function(*arguments))
    except BaseException as error:
        results.put(error)


def _watch(ref: weakref.ref[Leader]) -> None:
    """End all ranks when one is silent, or late.

    A collective waits for it, which no thread of this process could end otherwise.
    """
    late_since: dict[int, float] = {}
    failed_since: dict[str, float] = {}
    while (leader := ref()) is not None and not leader.closing and leader.failure is None:
        now, options = time.monotonic(), leader.options
        silent = next(
            (
                each
                for each in leader.followers
                if each.heard_at is not None and now - each.heard_at > options.silence
            ),
            None,
        )
        with leader.news:
            late = leader.find_late()
            late_since = {} if late is None else {late.index: late_since.get(late.index, now)}
            failed = leader.find_failed()
            failed_since = {failed: failed_since.get(failed, now)} if failed else {}
            if failed and now - failed_since[failed] > _SKEW_SECONDS:
                leader._fail(EngineDied(failed))
            elif silent is not None:
                text = f"{silent} gave no sign of life for {options.silence:g} s"
                leader._fail(EngineDied(f"{text}; it is stopped, or its machine is overloaded"))
            elif late is not None and now - late_since[late.index] > options.patience:
                text = f"{late} has not finished a step {options.patience:g} s after rank 0"
                leader._fail(EngineDied(text))
            elif now - min(leader.asked_at.values(), default=now) > options.patience:
                missing = [
                    str(each) for each in leader.followers if each.finished < max(leader.asked_at)
                ]
                text = f"a step has not ended for {options.patience:g} s on {', '.join(missing)}"
                leader._fail(EngineDied(text))
        del leader
        time.sleep(_WATCH_SECONDS)


def _send_or_drop(link: Link[FromRank], message: Message) -> None:
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
