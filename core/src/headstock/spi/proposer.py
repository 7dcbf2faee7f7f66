"""Proposers: they guess the next tokens of rows, which the model then verifies in one step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import frozen

from headstock.spi.arrays import Ints
from headstock.spi.plugin import PluginSpec


@frozen(kw_only=True)
class ProposerSpec(PluginSpec):
    """A proposer as its entry point returns it; `implementation` names a `Proposer`.

    by_model: whether the model's own layers make the drafts, in the step that samples what comes
        before them (`Model.draft`); `propose` is never called then
    takes_model: whether it needs a second model, by `--draft-model`
    """

    by_model: bool = False
    takes_model: bool = False


class DraftModel(ABC):
    """A second model in the engine's process, with memory and operations of its own."""

    @property
    @abstractmethod
    def vocab(self) -> int:
        """How many token ids it has."""

    @abstractmethod
    def continue_rows(self, tokens: Sequence[Ints], counts: Ints) -> Sequence[Ints]:
        """The likeliest next tokens of each row.

        What rows have in common with those of earlier calls is not computed again.

        tokens: one a row, [n] int32, not empty    counts: [rows] int32, how many for each
        returns: one a row, [at most its count] int32; fewer for a row that is too long
        """

    @abstractmethod
    def close(self) -> None:
        """Free the device."""


@frozen(kw_only=True, eq=False)
class ProposerContext:
    """What a proposer is told before the engine divides the device's memory.

    vocab: how many token ids the model has
    max_rows: how many rows are asked about at once, at most
    max_len: tokens of a row, at most
    device: "cpu" or "cuda"
    draft_model: as `--draft-model` names it; empty without
    open_model: serves a second model, by its name and settings of its engine, as `EngineConfig`
        names them; the proposer closes it. Raises as the engine's own start
    """

    vocab: int
    max_rows: int
    max_len: int
    device: str
    draft_model: str
    open_model: Callable[[str, Mapping[str, Any]], DraftModel]


class Proposer(ABC):
    """Guesses at the next tokens of rows, made on the host between two steps.

    No guess changes a token: a row samples at each of its drafts as if alone, and goes on behind
    the first draft that differs from the sample before it. A wrong guess costs time alone.

    It is made with an instance of the spec's options class, or with nothing where the spec names
    none.

    raises: ValueError when the options do not suit it, with the next move
    """

    @property
    @abstractmethod
    def max_drafts(self) -> int:
        """The most drafts of a row in a step, 1 to 15; it never changes.

        Memory and graphs are planned for this number.
        """

    def start(self, context: ProposerContext) -> None:
        """Get ready, before the engine divides the device's memory; by default nothing.

        Called once, where the engine is: not on further ranks.
        raises: ValueError when it cannot serve the context, with the next move
        """
        return

    def end(self, ids: Ints) -> None:
        """These rows are over; their ids come never again. By default nothing.

        ids: [n] int64
        """
        return

    def close(self) -> None:
        """Free what `start` took; a second call does nothing."""
        return

    # Rows whose token in flight is unknown are asked about as well, with what is known of them:
    # two drafts or more hold such a row back until that token has come.
    def propose(self, tokens: Sequence[Ints], room: Ints, ids: Ints) -> tuple[Ints, Ints]:
        """Guess the tokens that follow those of each row.

        tokens: one a row, [n] int32 read-only, its prompt and output so far
        room: [rows] int32 read-only, the most drafts that are of use, at least 1
        ids: [rows] int64 read-only, a number for each row, until it ends or is preempted
        returns: [rows] int32, how many drafts each row gets, none where no guess is likely; and
            the drafts, row by row, [sum of the counts] int32
        """
        raise NotImplementedError(f"{type(self).__name__} has no propose")
