"""Steps as a runner is offered them for a replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from attrs import frozen

from headstock.spi.batch import Sampling

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from headstock.spi.attention import PrefixGroups

AttendInto = Callable[["Tensor", int, "Tensor"], None]
"""`attend(q, layer, out)`: writes attention of a step's queries to `out`, both
[tokens, heads, head_dim].
"""


def _do_nothing() -> None:
    """Sampling reads nothing that the host makes."""


@frozen(kw_only=True, eq=False)
class DecodeStep:
    """A step in which each row computes `query_len` tokens after earlier ones, and samples at each.

    row_ids, starts: [n] int64 numpy, each row and its first position in this step
    query_len: tokens of each row: 1, or `Program.verify_len` where some row verifies drafts. A row
        with fewer drafts computes what the token table holds behind them; its samples there are
        dropped. The sample has `query_len` positions a row, row by row
    kind: the settings that matter for some row ("temperature", ...), as `RowTables.sampling` takes
        them; None when sampling needs more than these
    sampling: makes the complete `Sampling`, for any kind
    groups: the rows that share leading pages, where reading these once is worth it; a runner that
        ignores it gives the same answer
    prepare_sampling: writes to the tables what sampling reads and the host makes meanwhile; it is
        called once the forward pass is launched, and before sampling is. `sampling` does it too
    """

    # Two numbers a row are all that a replay is given: nothing on the device says how far a row is,
    # so nothing there can drift from the plan (docs/decisions/0015-replayed-decode-steps.md).
    row_ids: np.ndarray
    starts: np.ndarray
    query_len: int
    kind: frozenset[str] | None
    sampling: Callable[[], Sampling]
    groups: PrefixGroups | None = None
    prepare_sampling: Callable[[], None] = _do_nothing


@frozen(kw_only=True, eq=False)
class PromptStep:
    """A step with prompt tokens or drafts: some row computes several tokens, or its first.

    Each row is scored at its last token, and one that verifies drafts at the token before them and
    at each of them.

    num_decode: how many rows at the front have one token each after earlier ones
    row_ids, starts, stops: [n] int64 numpy, each row and the half-open interval of its positions
    is_sampled: [n] bool numpy; False where the row's prompt goes on after this step, so that no
        token is stored
    num_logits: [n] int32 numpy, how many of each row's last tokens are scored; None for one each
    kind, sampling, prepare_sampling: as in `DecodeStep`, for the scored tokens
    groups: as in `DecodeStep`, of the rows at the front, where `Runner.uses_groups` said so;
        `attention` reads each row by itself
    attention: plans the step's attention on the host and returns the function that computes it;
        the first call of a step may come after work has been launched
    """

    num_decode: int
    row_ids: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    is_sampled: np.ndarray
    kind: frozenset[str] | None
    sampling: Callable[[], Sampling]
    attention: Callable[[], AttendInto]
    num_logits: np.ndarray | None = None
    prepare_sampling: Callable[[], None] = _do_nothing
    groups: PrefixGroups | None = None

    @property
    def num_tokens(self) -> int:
        """How many tokens the step computes."""
        return int((self.stops - self.starts).sum())

    @property
    def scored_tokens(self) -> np.ndarray:
        """The index of each scored token in the step, [logits] int64."""
        last: np.ndarray = (self.stops - self.starts).cumsum() - 1
        return last if self.num_logits is None else self._spread(last)

    @property
    def scored_positions(self) -> np.ndarray:
        """The position of each scored token, [logits] int64."""
        last: np.ndarray = self.stops - 1
        return last if self.num_logits is None else self._spread(last)

    @property
    def scored_rows(self) -> np.ndarray:
        """The row of each scored token, [logits] int64."""
        return self.row_ids if self.num_logits is None else self.row_ids.repeat(self.num_logits)

    @property
    def scored_is_sampled(self) -> np.ndarray:
        """Whether each scored token's sample is stored, [logits] bool."""
        counts = self.num_logits
        return self.is_sampled if counts is None else self.is_sampled.repeat(counts)

    def _spread(self, last: np.ndarray) -> np.ndarray:
        """Spread what each row has at its last token to all of its scored tokens.

        last, returns: [n], [logits] int64
        """
        counts = self.num_logits
        assert counts is not None
        ends = counts.cumsum()
        spread: np.ndarray = (last + 1 - ends).repeat(counts)
        spread += range(len(spread))
        return spread
