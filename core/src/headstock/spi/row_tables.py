"""The tables of the device, out of which core makes what a captured step reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from attrs import evolve, frozen

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

    from headstock.spi.attention import AttentionStep, PrefixGroups
    from headstock.spi.batch import Batch, Sample, Sampling
    from headstock.spi.step import Step


@frozen(kw_only=True, eq=False)
class PromptInputs:
    """What a captured prompt step is given, at addresses that stay.

    Rows and tokens that the step lacks are padding: the padding row at position 0. A row that
    pads has no tokens, and tokens that pad belong to no row of `query_start`.

    memory: the bytes that all the others are views of
    row_ids, starts: [rows] int64, each row and its first position in this step
    query_start: [rows + 1] int32, where each row's tokens begin, and where the last row's end
    context_lens: [rows] int32, this step's tokens included; 1 for padding
    token_rows, positions: [tokens] int64, each token's row and its position in that row
    """

    memory: Tensor
    row_ids: Tensor
    starts: Tensor
    query_start: Tensor
    context_lens: Tensor
    token_rows: Tensor
    positions: Tensor

    def first_rows(self, count: int) -> PromptInputs:
        """Return the inputs of the first rows alone, over the same memory and tokens."""
        return evolve(
            self,
            row_ids=self.row_ids[:count],
            starts=self.starts[:count],
            query_start=self.query_start[: count + 1],
            context_lens=self.context_lens[:count],
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
    def batch(self, row_ids: Tensor, starts: Tensor, query_len: int) -> Batch:
        """Make the batch in which each row computes `query_len` tokens, every one of them scored.

        How these are sampled is no part of it: `sampling` makes that.
        row_ids, starts: [n] int64, each row and its first position in this step
        """

    @abstractmethod
    def attention_step(
        self,
        row_ids: Tensor,
        starts: Tensor,
        query_len: int,
        host_lens: np.ndarray,
        prefixes: PrefixInputs | None = None,
    ) -> AttentionStep:
        """Make the attention step of that batch.

        row_ids, starts: [n] int64, as in `batch`
        host_lens: [n] int32, the context lengths after the step, or the most that they may be
        prefixes: of these rows; with them the step has `shared`, for one token a row
        """

    @abstractmethod
    def prefix_inputs(self, num_rows: int) -> PrefixInputs:
        """Allocate the inputs of steps of at most so many rows, without groups."""

    @abstractmethod
    def write_prefix_inputs(self, inputs: PrefixInputs, groups: PrefixGroups) -> None:
        """Bring the inputs up to date with a step's groups, by one copy to the device.

        inputs: as `prefix_inputs` made them
        writes: inputs
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

    @abstractmethod
    def prompt_inputs(self, num_rows: int, num_tokens: int) -> PromptInputs:
        """Allocate the inputs of prompt steps of at most this size; all of them is padding."""

    @abstractmethod
    def write_prompt_inputs(self, inputs: PromptInputs, step: Step) -> None:
        """Bring the inputs up to date with a step, by one copy to the device.

        inputs: as `prompt_inputs` made them
        writes: inputs
        """

    @abstractmethod
    def prompt_batch(self, inputs: PromptInputs) -> Batch:
        """Make the batch of the inputs, padding included, every token of it scored.

        As in `batch`, it does not say how.
        """

    @abstractmethod
    def prompt_attention_step(
        self, inputs: PromptInputs, max_seq_len: int, *, prefixes: PrefixInputs | None = None
    ) -> AttentionStep:
        """Make the attention step of the inputs' rows.

        The host lengths are upper bounds, because a captured step serves all lengths up to them.

        prefixes: of these rows; with them the step has `shared`, for one token a row that shares
        """
