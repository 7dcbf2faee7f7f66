"""Logits processors: they change the scores of requests that ask for it, before one is sampled."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from attrs import field, frozen
from attrs.validators import ge, in_, instance_of

from headstock.spi.arrays import Ints
from headstock.spi.plugin import PluginSpec

if TYPE_CHECKING:
    from torch import Tensor


@frozen(kw_only=True)
class LogitsSpec(PluginSpec):
    """A logits processor as its entry point returns it; `implementation` names a `LogitsProcessor`.

    `request_args` names the class of what requests may give it.
    """


@frozen(kw_only=True)
class LogitColumn:
    """An argument of a processor that differs from row to row; core keeps it on the device.

    neutral: the value of rows that the processor shall leave as they are
    width: how many numbers a row has; 0 for one
    in_forward: operations read it too (`Batch.columns`). A request whose value is not neutral then
        shares cached pages only with requests of equal values
    """

    neutral: float = field(validator=instance_of((int, float)))
    dtype: Literal["float32", "int64"] = field(
        default="float32", validator=in_(("float32", "int64"))
    )
    width: int = field(default=0, validator=[instance_of(int), ge(0)])
    in_forward: bool = field(default=False, validator=instance_of(bool))

    def __attrs_post_init__(self) -> None:
        if self.dtype == "int64" and self.neutral != int(self.neutral):
            raise ValueError(
                f"neutral of an int64 column: expected a whole number, got {self.neutral}"
            )


class LogitsProcessor(ABC):
    """Changes logits of rows whose requests ask for it.

    It is made with an instance of the spec's options class, or with nothing where the spec names
    none, and keeps nothing of a row: what differs between rows is in its columns.

    raises: ValueError when the options do not suit it, with the next move
    """

    @property
    @abstractmethod
    def columns(self) -> Mapping[str, LogitColumn]:
        """The arguments by name; they never change."""

    # Greedy rows are spared a processor that keeps the best token: vLLM draws the same line, by
    # `is_argmax_invariant`.
    @property
    @abstractmethod
    def changes_argmax(self) -> bool:
        """Whether another token may be the best afterwards.

        If so, it sees the logits before the temperature. If not, it sees them divided by the
        temperature and less their maximum, before top-k, top-p and min-p, and greedy rows do
        without it.
        """

    @abstractmethod
    def row(self, args: Any, prompt: Ints, vocab: int) -> Mapping[str, Any] | None:
        """The values of a request's columns; those left out are neutral. None for all neutral.

        Called once a request, on the host; for one that pools only where a column is `in_forward`.

        args: an instance of the spec's `request_args` class; None where the spec names none, or
            the request gives none of its fields
        prompt: [n] int32 read-only
        raises: ValueError when this request cannot be served, with the next move
        """

    # A row of logits is not a request: rows that verify drafts have several.
    @abstractmethod
    def apply(self, logits: Tensor, at: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        """The logits as they are to be sampled. A graph may capture it.

        It neither reads the device nor waits for it. Rows with neutral values must stay as they
        are, and each row depends on itself alone. `logits` may be written and returned.

        logits, result: [n, vocab] float32
        at: [n] int64, the position in its request of the token that each row samples
        columns: by name, [n] or [n, width]
        """
