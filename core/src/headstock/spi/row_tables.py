"""The device's tables, from which core makes the inputs of a captured step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from attrs import evolve, frozen

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

    from headstock.spi.attention import AttentionStep
    from headstock.spi.batch import Batch, Sample, Sampling
    from headstock.spi.step import Step


@frozen(kw_only=True, eq=False)
class StepInputs:
    """What a captured step is given, at addresses that stay.

    Rows and tokens that the step lacks are padding: the padding row at position 0. A row that
    pads has no tokens, and tokens that pad belong to no row of `query_start`.

    row_ids, starts: [rows] int64, each row and its first position in this step
    query_len: how many tokens each row has, if all have as many; the rest follows from it then and
        is None. Else 0
    memory: the bytes that all the others are views of
    query_start: [rows + 1] int32, where each row's tokens begin, and where the last row's end
    context_lens: [rows] int32, this step's tokens included; 1 for padding
    token_rows, positions: [tokens] int64, each token's row and its position in that row
    saved: [1 + KV groups, MOST_SAVED] int64, as `Step.saved`; token 0 and page 0 for none. None for
        a model without states, and for rows of one length
    """

    row_ids: Tensor
    starts: Tensor
    query_len: int = 0
    memory: Tensor | None = None
    query_start: Tensor | None = None
    context_lens: Tensor | None = None
    token_rows: Tensor | None = None
    positions: Tensor | None = None
    saved: Tensor | None = None

    @classmethod
    def of_rows(cls, row_ids: Tensor, starts: Tensor, query_len: int) -> StepInputs:
        """The inputs of rows that compute `query_len` tokens each, over tensors of the caller's."""
        return cls(row_ids=row_ids, starts=starts, query_len=query_len)

    def first_rows(self, count: int) -> StepInputs:
        """Return the inputs of the first rows alone, over the same memory and tokens."""
        return evolve(
            self,
            row_ids=self.row_ids[:count],
            starts=self.starts[:count],
            query_start=None if self.query_start is None else self.query_start[: count + 1],
            context_lens=None if self.context_lens is None else self.context_lens[:count],
        )


@frozen(kw_only=True, eq=False)
class PrefixInputs:
    """What a captured step is given of the rows that share pages, at addresses that stay.

    Without groups no row shares anything.

    memory: the bytes that the others are views of
    group_starts: [MAX_PREFIX_GROUPS + 1] int32, where the rows of each group begin; a group that
        the step lacks has no rows
    shared_lens: [rows] int32, how many leading tokens each row shares with its group
    """

    memory: Tensor
    group_starts: Tensor
    shared_lens: Tensor

    def first_rows(self, count: int) -> PrefixInputs:
        """Return the inputs of the first rows alone, over the same memory."""
        return evolve(self, shared_lens=self.shared_lens[:count])


class RowTables(ABC):
    """What the device knows of each row, and the records that follow from it.

    Runners get every `Batch`, `AttentionStep` and `Sampling` here or from core's calls and make
    none themselves. So a new field of these records reaches a runner that does not know of it.
    The functions that make records can be captured: they neither read the device nor wait for it,
    and a replay repeats them with the tensors' new values.
    """

    # Steps with and without graphs read and write the same tables, so they follow each other in any
    # order, and a row may sit out a step without a message to a graph.
    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the tables lie."""

    @property
    @abstractmethod
    def padding_row(self) -> int:
        """The row that pads a batch, at position 0; any number of a batch's entries may use it.

        Its pages are the dummy page alone.
        """

    @abstractmethod
    def step_inputs(self, num_rows: int, num_tokens: int) -> StepInputs:
        """Allocate the inputs of steps of at most this size, with rows of any lengths; all of them
        is padding.
        """

    @abstractmethod
    def prefix_inputs(self, num_rows: int) -> PrefixInputs:
        """Allocate the inputs of steps of at most `num_rows` rows, without groups."""

    @abstractmethod
    def write(self, inputs: StepInputs | PrefixInputs, step: Step) -> None:
        """Bring the inputs up to date with a step or with its groups, by one copy to the device.

        inputs: as `step_inputs` or `prefix_inputs` made them
        writes: inputs
        """

    @abstractmethod
    def batch(self, inputs: StepInputs) -> Batch:
        """Make the batch of the inputs, padding included, every token of it scored.

        It does not include their sampling, which `sampling` makes.
        """

    @abstractmethod
    def read_tokens(self, token_rows: Tensor, positions: Tensor) -> Tensor:
        """Read the tokens at these positions of rows.

        token_rows, positions, returns: [tokens] int64
        """

    @abstractmethod
    def keep_drafts(self, row_ids: Tensor | np.ndarray, positions: Tensor, drafts: Tensor) -> None:
        """Write drafts to the token table, where the next step verifies them.

        Those past the table's end are left out. A graph may capture it, of tensors.

        row_ids: [rows] int64, the padding row where nothing is to be kept
        positions: [rows] int64, of each row's first draft    drafts: [rows, k] int64
        writes: the token table
        """

    @abstractmethod
    def attention_step(
        self, inputs: StepInputs, host_lens: np.ndarray, prefixes: PrefixInputs | None = None
    ) -> AttentionStep:
        """Make the attention step of the inputs' rows.

        host_lens: [rows] int32, the context lengths after the step, or the most that they may be:
            a captured step serves all lengths up to them
        prefixes: of these rows; with them the step has `shared`, for one token a row that shares
        """

    @abstractmethod
    def sampling(self, row_ids: Tensor, positions: Tensor, kind: frozenset[str]) -> Sampling:
        """Make the settings that `kind` names, for the tokens that come to these positions.

        row_ids, positions: [n] int64
        """

    @abstractmethod
    def keep(
        self,
        row_ids: Tensor | np.ndarray,
        positions: Tensor | np.ndarray,
        sample: Sample,
        scored: np.ndarray | None = None,
    ) -> None:
        """Write sampled tokens to the token table. A graph may capture it, of tensors.

        row_ids, positions: [n] int64
        scored: [n] int64, which of the sample's positions they are of; None for all
        writes: the token table
        """
