"""Cache policies: which pages of other requests a new request may share. They never see tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from attrs import field, frozen
from attrs.validators import instance_of

from headstock.spi.arrays import Ints
from headstock.spi.int_set import IntSet
from headstock.spi.kv import LayoutKind
from headstock.spi.plugin import PluginSpec


@frozen(kw_only=True)
class CacheCapabilities:
    """What a policy can do.

    page_sizes: in tokens
    layouts: of the KV groups that it indexes; only groups that keep all tokens can be shared
    reuse: whether it ever shares a page
    """

    page_sizes: IntSet
    layouts: frozenset[LayoutKind]
    reuse: bool


@frozen(kw_only=True)
class CacheSpec(PluginSpec):
    """A cache policy as its entry point returns it; `implementation` names a `CachePolicy`."""

    capabilities: CacheCapabilities = field(validator=instance_of(CacheCapabilities))


@frozen(eq=False)
class Match:
    """A prefix found in the index: its pages in order, and the handle that stands for its end.

    pages: [n] int32
    """

    # Whole pages: a page has one owner for writing, so half of one cannot be shared
    # (docs/decisions/0004-prefix-tree.md).
    pages: Ints
    handle: Any


@frozen(eq=False)
class Inserted:
    """The result of an insertion.

    canonical: [n] int32, the page that now stands for each inserted page's tokens: another one
        where the index had these tokens already
    handle: the new end of the prefix
    """

    canonical: Ints
    handle: Any


@frozen(kw_only=True)
class CacheStats:
    """Counts of an index: its pages, and those of them that a hold protects."""

    pages: int
    held: int


class CachePolicy(ABC):
    """Policy over an index that it alone understands.

    The index is an *owned value*: core passes it in, the policy may write it in place, and core
    keeps no older one. A hold on a handle protects all pages from the root to that handle from
    eviction. Tokens of one `namespace`, a tenant, are never matched in another. Handles are opaque
    to core.
    """

    @abstractmethod
    def __init__(self, page_size: int, options: Any = None) -> None:
        """A policy for pages of `page_size` tokens."""

    @abstractmethod
    def new_index(self) -> Any:
        """An empty index."""

    @abstractmethod
    def match_prefix(self, index: Any, tokens: Ints, namespace: str) -> Match:
        """The longest indexed prefix of whole pages of `tokens`. A caller sees no change.

        tokens: [n] int32
        """

    @abstractmethod
    def hold(self, index: Any, handle: Any) -> None:
        """Protect the pages up to `handle` from eviction until `release` was called as often."""

    @abstractmethod
    def release(self, index: Any, handle: Any) -> None:
        """Undo one hold of `handle`."""

    @abstractmethod
    def insert(
        self, index: Any, handle: Any, tokens: Ints, pages: Ints, namespace: str
    ) -> Inserted:
        """Index whole pages that follow `handle` (None: the root); the hold moves to the new one.

        tokens: [n * page_size] int32    pages: [n] int32
        """

    def insert_each(
        self,
        index: Any,
        handles: Sequence[Any],
        counts: Sequence[int],
        tokens: Ints,
        pages: Ints,
        namespaces: Sequence[str],
    ) -> tuple[Ints, list[Any]]:
        """`insert` for each row in turn: `counts[i]` pages behind `handles[i]`.

        There is no need to write another, but core calls this in every step, so that a short loop
        pays.

        tokens: [sum of counts, page_size] int32    pages: [sum of counts] int32
        returns: what each page now is, [sum of counts] int32 (`pages` itself where nothing
            differs); the new handles
        """
        import numpy as np

        # A policy that does better saves some 2 us for each page that fills
        # (docs/decisions/0013-owned-pages.md).
        canonical, ends, stop = [], [], 0
        for handle, count, namespace in zip(handles, counts, namespaces, strict=True):
            start, stop = stop, stop + count
            inserted = self.insert(
                index, handle, tokens[start:stop].reshape(-1), pages[start:stop], namespace
            )
            canonical.append(inserted.canonical)
            ends.append(inserted.handle)
        return np.concatenate(canonical), ends

    @abstractmethod
    def evict(self, index: Any, count: int) -> Ints:
        """Drop up to `count` unheld pages, oldest use first, and return them; O(evicted log n).

        returns: [at most count] int32
        """

    # Asked in every step, to tell the scheduler how many pages it may count on.
    @abstractmethod
    def count_evictable(self, index: Any) -> int:
        """How many pages `evict` could return now; O(1)."""

    @abstractmethod
    def evict_all(self, index: Any) -> Ints:
        """Drop every unheld page and return them all.   returns: [n] int32"""

    @abstractmethod
    def stats(self, index: Any) -> CacheStats:
        """The counts of the index."""

    @abstractmethod
    def check_index(self, index: Any) -> None:
        """Raise AssertionError if the index contradicts itself. For tests, --debug-invariants."""

    @abstractmethod
    def indexed_pages(self, index: Any) -> Ints:
        """Every page of the index, in no order. For invariants and pictures; O(pages).

        returns: [n] int32
        """
