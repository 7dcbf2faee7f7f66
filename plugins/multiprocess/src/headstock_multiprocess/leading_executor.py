"""Rank 0's executor: the other ranks run its plans too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from headstock.errors import PLUGIN_FAILURES
from headstock.execution import abstract_executor
from headstock.scheduler import Plan, RequestState
from headstock.spi import Sample
from headstock_multiprocess.messages import Message, PrepareNext, digest_sample, make_execute


class AskedRanks(Protocol):
    """What an executor needs of rank 0."""

    def ask(self, message: Message) -> int:
        """Send a message that asks for a step or a capture; return its number."""

    def check(self) -> None:
        """Raise EngineDied when the ranks cannot go on."""

    def note_done(self, number: int, result: int) -> None:
        """Rank 0 has done a step, with this result.   raises: EngineDied"""

    def judge_failure(self, number: int, error: BaseException) -> None:
        """Raise EngineDied unless a step failed on all ranks, which go on then."""

    def ask_to_end(self) -> None:
        """Have the other ranks free their devices and end."""

    def close(self) -> None:
        """End the other ranks."""


class LeadingExecutor(abstract_executor.Executor):
    """Has the other ranks run its plans too."""

    def __init__(self, inner: abstract_executor.Executor, ranks: AskedRanks) -> None:
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
        self.ranks.note_done(number, left)
        return left

    def close(self) -> None:
        """See `Executor.close`."""
        # All ranks free their devices at the same time.
        self.ranks.ask_to_end()
        try:
            self.inner.close()
        finally:
            self.ranks.close()


class LedStep(abstract_executor.Pending):
    """A step that all ranks run."""

    def __init__(self, inner: abstract_executor.Pending, ranks: AskedRanks, number: int) -> None:
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
        self.has_drafts = self.inner.has_drafts
        self.ranks.note_done(self.number, digest_sample(sample))
        return sample

    def wait_drafts(self) -> Tensor:
        """See `Pending.wait_drafts`. What other ranks guess shows in the next step's tokens."""
        return self.inner.wait_drafts()
