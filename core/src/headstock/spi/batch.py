"""The tensors of one step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from attrs import evolve, field, fields, frozen

from headstock.errors import PluginBroken

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from headstock.spi.logits import LogitsProcessor

    Record = TypeVar("Record", "Sampling", "Sample")


@frozen(kw_only=True, eq=False)
class Processing:
    """What logits processors do to some of a step's logits.

    rows: [m] int64, which of the logits, some of them perhaps several times; None for all
    parts: each processor with its columns, [m] or [m, width] by name, in the order in which they
        are applied
    """

    # Some rows and not all: a processor works in float32 on the whole vocabulary, and eight rows
    # that ask for one shall not slow 256.
    rows: Tensor | None
    parts: tuple[tuple[LogitsProcessor, Mapping[str, Tensor]], ...]

    def part(self, start: int, stop: int) -> Processing | None:
        """Return what is done to the logits from `start` to `stop`; None when nothing is."""
        if self.rows is None:
            return Processing(rows=None, parts=self._select(slice(start, stop)))
        inside = ((self.rows >= start) & (self.rows < stop)).nonzero().flatten()
        if not len(inside):
            return None
        return Processing(rows=self.rows[inside] - start, parts=self._select(inside))

    def _select(self, which: Any) -> tuple[tuple[LogitsProcessor, Mapping[str, Tensor]], ...]:
        """Return the parts with these entries of their columns."""
        return tuple(
            (processor, {name: column[which] for name, column in columns.items()})
            for processor, columns in self.parts
        )


@frozen(kw_only=True, eq=False)
class Sampling:
    """How logits are sampled, one entry a logit position; a field that no row needs is None.

    temperature, top_p, min_p: [n] float32
    top_k: [n] int64, vocab for off
    seeds, positions: [n] int64
    repetition, presence, frequency: [n] float32
    history: [n, max_len] int64 tokens
    history_lens, prompt_lens: [n] int64
    mask: [n, ceil(vocab / 32)] int32, the tokens that may be sampled: bit t % 32 of word t // 32
        for token t. Bits past the vocabulary mean nothing. On a rank of several, the words of its
        part of the vocabulary; `Ops.sample` gets them all
    banned: [n, vocab] bool, tokens that may not be sampled
    bias: [n, vocab] float32 added to the logits
    processing: what logits processors do; set, `positions` is too
    targets: [n] int64, the token whose log-probability is reported; -1 for the sampled one
    top_logprobs: the most alternatives that any row asks for; -1 when no row asks for
        log-probabilities
    """

    temperature: Tensor | None = None
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None
    seeds: Tensor | None = None
    positions: Tensor | None = None
    repetition: Tensor | None = None
    presence: Tensor | None = None
    frequency: Tensor | None = None
    history: Tensor | None = None
    history_lens: Tensor | None = None
    prompt_lens: Tensor | None = None
    mask: Tensor | None = None
    banned: Tensor | None = None
    bias: Tensor | None = None
    processing: Processing | None = None
    targets: Tensor | None = None
    top_logprobs: int = -1

    def part(self, start: int, stop: int) -> Sampling:
        """Return the settings of the logits from `start` to `stop`."""
        processing = self.processing
        if processing is not None:
            processing = processing.part(start, stop)
        return evolve(_index_tensors(self, slice(start, stop)), processing=processing)

    def take(self, rows: Tensor) -> Sampling:
        """Return the settings of these logits, without processing.   rows: [m] int64"""
        return _index_tensors(evolve(self, processing=None), rows)


@frozen(kw_only=True, eq=False)
class Sample:
    """The runner's type: what was sampled at each logit position.

    On the device when a runner or ops return it, in host memory after `Pending.wait`.

    tokens: [n] int64
    healthy: [n] bool, False where the logits held NaN or only infinities
    pooled: [m, hidden] float32, one a row of `Batch.pooling`, on which no logit position falls;
        None for a batch without one
    make_drafts: launches the model's own layers, which guess what follows each of the step's rows,
        writes their guesses to the token table, and returns them, [rows, k] int64; called once,
        before anything else is launched; None where they guess nothing, and in host memory
    verified: [n] int64, the step's tokens at these positions, drafts among them, which the host
        may not know; None where `make_drafts` is
    order: [logits] int64 numpy, where each of the step's logits is among these positions, of which
        some may be padding; None where they are the same, in the same order
    is_replayed: whether the step was a replay
    logprobs: [n] float32 of the tokens
    top_ids, top_logprobs: [n, k]
    ranks: [n] int64 of the tokens, how many are as likely as it or likelier, itself among them
    logprobs and those after it are None when no row asked for log-probabilities. Ranks alone may be
    missing from what operations return: headstock then recomputes the scores.
    """

    # `healthy` comes with every sample: only logits tell that what a row computed is sound
    # (docs/decisions/0011-scored-chunks.md).
    tokens: Tensor
    healthy: Tensor
    logprobs: Tensor | None = None
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None
    ranks: Tensor | None = None
    pooled: Tensor | None = None
    make_drafts: Callable[[], Tensor] | None = None
    verified: Tensor | None = None
    order: np.ndarray | None = None
    is_replayed: bool = False

    def first(self, count: int) -> Sample:
        """Return what was sampled at the first `count` logit positions."""
        return self if count == len(self.tokens) else _index_tensors(self, slice(count))

    def with_drafts(self, make_drafts: Callable[[], Tensor], verified: Tensor) -> Sample:
        """Return the sample with what makes drafts behind it."""
        return evolve(self, make_drafts=make_drafts, verified=verified)

    def replayed(self, order: np.ndarray | None = None) -> Sample:
        """Return the sample as one of a replay, with that `order`."""
        return evolve(self, order=order, is_replayed=True)


@frozen(kw_only=True, eq=False)
class Pooling:
    """Rows of a batch whose hidden states are pooled instead of being scored.

    rows: [m] int64, which of the batch's rows
    is_mean: [m] bool, True for the mean over the row's tokens, those of earlier steps included;
        else the row's last token counts
    sums: [row tables' rows, hidden] float32, where hidden states are summed up over steps, by
        `Batch.row_ids`; what a row has there counts only after its first tokens. None when no row
        takes the mean
    """

    rows: Tensor
    is_mean: Tensor
    sums: Tensor | None


@frozen(kw_only=True, eq=False)
class KVLayer:
    """The pages of one layer, as views of its pool; parts that its layout lacks are None or empty.

    group: its KV group
    k, v: [pages, page_size, kv_heads, k_dim], [pages, page_size, kv_heads, v_dim]
    latent: [pages, page_size, dim], the part with the position last
    state: by name, [pages, *shape]
    """

    group: int
    k: Tensor | None = None
    v: Tensor | None = None
    latent: Tensor | None = None
    state: Mapping[str, Tensor] = field(factory=dict)

    @property
    def page_slots(self) -> int:
        """How many of `Batch.slots` a page has: its tokens, or one where it holds a state."""
        part = self.k if self.latent is None else self.latent
        return 1 if part is None else part.shape[1]


@frozen(kw_only=True, eq=False)
class RowColumns:
    """What requests gave logits processors, for operations.

    tables: by processor and column, those that are declared `in_forward`; [rows] or [rows, width]
        of the row tables, to be indexed by `Batch.row_ids` or `Batch.token_rows`. Rows that pad
        have neutral values
    """

    tables: Mapping[str, Mapping[str, Tensor]] = MappingProxyType({})

    def read(self, processor: str, column: str) -> Tensor | None:
        """Return the table of a column; None where the engine runs without the processor.

        raises: PluginBroken when the processor declares no such column `in_forward`
        """
        columns = self.tables.get(processor)
        if columns is None:
            return None
        # Without the declaration requests of other values would share keys and values.
        if column not in columns:
            raise PluginBroken(
                f"the logits processor {processor!r} declares no column {column!r} that operations "
                "may read; its author should declare it with LogitColumn(in_forward=True)"
            )
        return columns[column]


@frozen(kw_only=True, eq=False)
class Batch:
    """One step's tokens, flat over its rows.

    tokens, positions: [tokens] int64
    token_rows: [tokens] int64, the row each token belongs to
    row_ids, starts: [n] int64, each row and its first position in this step
    query_start: [n + 1] int32, where each row's tokens begin, and where the last row's end; what
        comes after that is padding
    max_query_len: tokens of the row with the most, or an upper bound
    slots: one a KV group, [tokens] int64, where what the group keeps of each token goes
        (page * page_size + offset); for a group with a state the page of the token's row
    state_pages: one a KV group, [n] int64, the page with each row's state; None for other groups.
        A row that starts at 0 has no state yet: what its page holds is another sequence's
    saved_tokens: [m] int64, tokens behind which a row's state also goes to a page of its own, where
        another sequence may go on, or this one when what follows is rejected; None for none. They
        are at multiples of `StateKV.alignment`, or among 16 tokens of a row
    saved_pages: one a KV group, [m] int64, these pages; None for groups without a state. Several
        entries may name page 0, which nobody reads. None of them is in `state_pages`
    kv: one a layer, the pages by their parts
    pools: one a layer, the same pages as they lie in memory; for full KV
        [pages, 2, page_size, kv_heads, head_dim]
    logit_indices: [m] int64, which tokens' hidden states are scored; None when that is every
        token in order
    pooling: the rows that are pooled; None when none is
    columns: what requests gave logits processors and operations may read
    """

    # Flat, because rows of a step have 1 to thousands of tokens: padding them would be computed
    # too.
    tokens: Tensor
    positions: Tensor
    token_rows: Tensor
    row_ids: Tensor
    starts: Tensor
    query_start: Tensor
    max_query_len: int
    slots: tuple[Tensor, ...]
    pools: tuple[Tensor, ...]
    logit_indices: Tensor | None
    state_pages: tuple[Tensor | None, ...] = ()
    saved_tokens: Tensor | None = None
    saved_pages: tuple[Tensor | None, ...] = ()
    kv: tuple[KVLayer, ...] = ()
    pooling: Pooling | None = None
    columns: RowColumns = RowColumns()


def _index_tensors(record: Record, which: Any) -> Record:
    """Return the record with these entries of each of its tensors."""
    values: dict[str, Any] = {
        field.name: getattr(record, field.name) for field in fields(type(record))
    }
    # By exclusion: the contract imports no torch. Rows are not logit positions.
    parts: dict[str, Any] = {
        name: value
        if value is None
        or isinstance(value, int | Processing)
        or name in ("pooled", "make_drafts", "order")
        else value[which]
        for name, value in values.items()
    }
    return type(record)(**parts)
