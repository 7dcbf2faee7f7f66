"""Proposers: they guess the next tokens of rows, which the model then verifies in one step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from attrs import frozen

from headstock.spi.arrays import Ints
from headstock.spi.plugin import PluginSpec


@frozen(kw_only=True)
class ProposerSpec(PluginSpec):
    """A proposer as its entry point returns it; `implementation` names a `Proposer`.

    by_model: whether the model's own layers make the drafts, in the step that samples what comes
        before them (`Model.draft`); `propose` is never called then
    """

    by_model: bool = False


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

    # Rows whose token in flight is unknown are asked about as well, with what is known of them:
    # two drafts or more hold such a row back until that token has come.
    def propose(self, tokens: Sequence[Ints], room: Ints) -> tuple[Ints, Ints]:
        """Guess the tokens that follow those of each row.

        tokens: one a row, [n] int32 read-only, its prompt and output so far
        room: [rows] int32 read-only, the most drafts that are of use, at least 1
        returns: [rows] int32, how many drafts each row gets, none where no guess is likely; and
            the drafts, row by row, [sum of the counts] int32
        """
        raise NotImplementedError(f"{type(self).__name__} has no propose")
