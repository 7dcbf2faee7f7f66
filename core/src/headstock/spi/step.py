"""A step as a runner is given it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from headstock.spi.attention import PrefixGroups
    from headstock.spi.batch import Batch, Sampling

MOST_SAVED = 32
"""States amid prompts that `StepInputs.saved` has room for."""
AttendInto = Callable[["Tensor", int, "Tensor"], None]
"""`attend(q, layer, out)`: writes attention of a step's queries to `out`, both
[tokens, heads, head_dim].
"""


@frozen(kw_only=True, eq=False, slots=False)
class Step(ABC):
    """Some rows, the tokens that each of them computes, and those that are scored.

    Core makes it. The arrays are read-only and of the host; the methods make what is on the device.

    num_decode: how many rows at the front have one token each after earlier ones
    row_ids, starts, stops: [n] int64, each row and the half-open interval of its positions
    num_logits: [n] int32, how many of each row's last tokens are scored: one; with drafts the token
        before them and each of them; the whole chunk where a prompt is scored; none where a row
        pools
    num_drafts: [n] int32, how many of each row's last tokens are drafts; None where no row has any
    is_sampled: [n] bool; False where no token follows the row's last one: its prompt goes on after
        this step, or it pools
    saved: [1 + KV groups, m] int64, tokens behind which states amid prompts are saved, by their
        index in the step, and the pages of each group; None for none
    groups: the rows at the front that share leading pages, where `grouped` found that reading these
        once is worth it; a runner that ignores them gives the same answer
    order: [logits] int64, which of this step's logits each one that core planned is; None for the
        same order
    """

    # Rows, positions and counts are all that a replay is given: nothing on the device says how far
    # a row is, so nothing there can drift from the plan
    # (docs/decisions/0015-replayed-decode-steps.md).
    num_decode: int
    row_ids: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    num_logits: np.ndarray
    is_sampled: np.ndarray
    num_drafts: np.ndarray | None = None
    saved: np.ndarray | None = None
    groups: PrefixGroups | None = None
    order: np.ndarray | None = None

    @abstractmethod
    def grouped(self) -> Step:
        """The step with `groups`, its rows group by group; itself where that is not worth it.

        Only for a runner that reads the pages of `groups` once.
        """

    @abstractmethod
    def batch(self) -> Batch:
        """Make the batch of the step's tokens, its pooling included."""

    @abstractmethod
    def attention(self) -> AttendInto:
        """Plan the step's attention on the host, and return the function that computes it.

        It may come after work has been launched.
        """

    @abstractmethod
    def kind(self, places: np.ndarray | None = None) -> frozenset[str] | None:
        """The settings that matter for some scored token ("temperature", ...), as
        `RowTables.sampling` takes them; None when sampling needs more than these.

        places: [logits] int64, where they are among the logits of a replay that pads some rows;
            None for the same places
        writes: what `RowTables.sampling` reads, except what `prepare_sampling` writes
        """

    @abstractmethod
    def prepare_sampling(self) -> None:
        """Write to the tables what sampling reads and the host makes meanwhile.

        Called once the forward pass is launched, and before sampling is. `sampling` does it too.
        """

    @abstractmethod
    def sampling(
        self, row_ids: np.ndarray | None = None, positions: np.ndarray | None = None
    ) -> Sampling:
        """Make the complete settings, for any kind.

        row_ids, positions: [n] int64, of tokens to score instead of the step's own
        """

    @property
    def num_tokens(self) -> int:
        """How many tokens the step computes."""
        return int((self.stops - self.starts).sum())

    @cached_property
    def is_decode(self) -> bool:
        """Whether each row has one token after earlier ones."""
        return self.num_decode == len(self.row_ids)

    @cached_property
    def is_scored_once(self) -> bool:
        """Whether each row is scored at its last token alone."""
        return bool((self.num_logits == 1).all())

    @property
    def is_plain(self) -> bool:
        """Whether each row is scored at its last token and at its drafts: none pools, no token of a
        prompt is scored but its last, and at most `MOST_SAVED` states amid prompts are saved.
        """
        if self.saved is not None and self.saved.shape[1] > MOST_SAVED:
            return False
        wanted = 1 if self.num_drafts is None else self.num_drafts + 1
        return bool((self.num_logits == wanted).all())

    @property
    def scored_tokens(self) -> np.ndarray:
        """The index of each scored token in the step, [logits] int64."""
        return self._spread((self.stops - self.starts).cumsum() - 1)

    @property
    def scored_positions(self) -> np.ndarray:
        """The position of each scored token, [logits] int64."""
        return self._spread(self.stops - 1)

    @property
    def scored_rows(self) -> np.ndarray:
        """The row of each scored token, [logits] int64."""
        return self.row_ids if self.is_scored_once else self.row_ids.repeat(self.num_logits)

    def list_stored(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """List the samples that become tokens: their rows, the positions of the tokens, and which
        of the scored tokens they follow. [m] int64 each

        A row that has drafts stores one at each of them: what the host rejects is written anew
        before it is read.
        """
        last = self.num_logits.cumsum() - 1
        if self.num_drafts is None:
            which = self.is_sampled
            return self.row_ids[which], self.stops[which], last[which]
        counts = (self.num_drafts + 1) * self.is_sampled
        at, positions = (_count_up_to(ends, counts) for ends in (last, self.stops))
        return self.row_ids.repeat(counts), positions, at

    def _spread(self, last: np.ndarray) -> np.ndarray:
        """Spread what each row has at its last token to all of its scored tokens.

        last, returns: [n], [logits] int64
        """
        return last if self.is_scored_once else _count_up_to(last, self.num_logits)


def _count_up_to(last: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Join runs of numbers by their lengths and last numbers.

    last, counts: [n]    returns: [sum of counts]
    """
    import numpy as np  # late, as in `headstock.spi.scheduler`

    firsts: np.ndarray = (last + 1 - counts.cumsum()).repeat(counts)
    return firsts + np.arange(len(firsts))
