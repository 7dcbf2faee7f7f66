"""What layers keep of a sequence: the layout of their pages, and for how long tokens stay."""

from __future__ import annotations

from enum import Enum
from typing import ClassVar

from attrs import frozen


class LayoutKind(Enum):
    """The kinds of layout that a part may claim to read or write; one that it omits is refused.

    FULL: a key and a value for each token and KV head
    LATENT: one vector for each token, which all heads share
    STATE: tensors of a fixed shape for each sequence
    """

    FULL = "full"
    LATENT = "latent"
    STATE = "state"


@frozen(kw_only=True)
class FullKV:
    """Keys and values: [page_tokens, kv_heads, k_dim] and [page_tokens, kv_heads, v_dim] a page."""

    kind: ClassVar[LayoutKind] = LayoutKind.FULL
    kv_heads: int
    k_dim: int
    v_dim: int


@frozen(kw_only=True)
class LatentKV:
    """One vector for each token: [page_tokens, dim] a page.

    dim: the whole vector, whose last `rope_dim` elements carry the position; queries are as wide,
        and outputs have `dim - rope_dim` elements
    """

    kind: ClassVar[LayoutKind] = LayoutKind.LATENT
    dim: int
    rope_dim: int

    @property
    def out_dim(self) -> int:
        """How many elements a head of the output has."""
        return self.dim - self.rope_dim


@frozen
class StateTensor:
    """One tensor of a state; `dtype` is a torch name, None for the model's."""

    name: str
    shape: tuple[int, ...]
    dtype: str | None = None


@frozen(kw_only=True)
class StateKV:
    """Tensors of a fixed shape for each sequence, however long it is: one page a sequence.

    Operations read and write them (`Batch.state_pages`); attention backends see none.

    alignment: a prompt may be cut at multiples of so many tokens, and no bit of its answer changes.
        Operations also write the states at such multiples, and behind any token of a row with few
        of them, to pages that they are given (`Batch.saved_pages`). None where that is not
        promised: its prefixes are never reused, and it takes no drafts
    """

    kind: ClassVar[LayoutKind] = LayoutKind.STATE
    tensors: tuple[StateTensor, ...]
    alignment: int | None = None


Layout = FullKV | LatentKV | StateKV


@frozen(kw_only=True)
class KVGroup:
    """Layers that share a layout and a page table.

    layers: each layer of a model is in exactly one group
    window: how many latest tokens stay; None for all. Every layer of such a group has a window
        of its own that is no longer. A state has none.
    dtype: of keys, values and latent vectors by torch name; None for the negotiated one
    """

    # A group has page tables of its own, because a window group frees the pages behind its window
    # while a full one keeps them (docs/decisions/0025-pages-by-group.md).
    layers: tuple[int, ...]
    layout: Layout
    window: int | None = None
    dtype: str | None = None

    @property
    def retains_all(self) -> bool:
        """Whether every token of a sequence stays until the sequence ends."""
        return self.window is None and self.layout.kind is not LayoutKind.STATE

    def first_kept_page(self, num_tokens: int, page_size: int) -> int:
        """The first page that a token behind `num_tokens` others reads; 0 where all stay."""
        # The token sees the latest `window` positions, its own included.
        return 0 if self.window is None else max(num_tokens - self.window + 1, 0) // page_size
