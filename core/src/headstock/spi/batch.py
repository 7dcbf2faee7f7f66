"""The tensors of one step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from attrs import field, fields, frozen

if TYPE_CHECKING:
    from torch import Tensor

    Record = TypeVar("Record", "Sampling", "Sample")


@frozen(kw_only=True, eq=False)
class Sampling:
    """How logits are sampled, one entry a logit position; a field that no row needs is None.

    temperature, top_p, min_p: [n] float32
    top_k: [n] int64, vocab for off
    seeds, positions: [n] int64
    repetition, presence, frequency: [n] float32
    history: [n, max_len] int64 tokens
    history_lens, prompt_lens: [n] int64
    banned: [n, vocab] bool, tokens that may not be sampled
    bias: [n, vocab] float32 added to the logits
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
    banned: Tensor | None = None
    bias: Tensor | None = None
    targets: Tensor | None = None
    top_logprobs: int = -1

    def part(self, start: int, stop: int) -> Sampling:
        """Return the settings of the logits from `start` to `stop`."""
        return _slice_tensors(self, start, stop)


@frozen(kw_only=True, eq=False)
class Sample:
    """The runner's type: what was sampled at each logit position.

    On the device when a runner or ops return it, in host memory after `Pending.wait`.

    tokens: [n] int64
    healthy: [n] bool, False where the logits held NaN or only infinities
    logprobs: [n] float32 of the tokens
    top_ids, top_logprobs: [n, k]
    The last three are None when no row asked for log-probabilities.
    """

    # `healthy` comes with every sample: only logits tell that what a row computed is sound
    # (docs/decisions/0011-scored-chunks.md).
    tokens: Tensor
    healthy: Tensor
    logprobs: Tensor | None = None
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None

    def first(self, count: int) -> Sample:
        """Return what was sampled at the first `count` logit positions."""
        return self if count == len(self.tokens) else _slice_tensors(self, 0, count)


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
    kv: one a layer, the pages by their parts
    pools: one a layer, the same pages as they lie in memory; for full KV
        [pages, 2, page_size, kv_heads, head_dim]
    logit_indices: [m] int64, which tokens' hidden states are scored; None when that is every
        token in order
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
    sampling: Sampling
    state_pages: tuple[Tensor | None, ...] = ()
    kv: tuple[KVLayer, ...] = ()


def _slice_tensors(record: Record, start: int, stop: int) -> Record:
    """Return the record with that part of each of its tensors."""
    values: dict[str, Any] = {
        field.name: getattr(record, field.name) for field in fields(type(record))
    }
    # By exclusion: the contract imports no torch.
    parts: dict[str, Any] = {
        name: value if value is None or isinstance(value, int) else value[start:stop]
        for name, value in values.items()
    }
    return type(record)(**parts)
