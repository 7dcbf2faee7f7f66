"""Cache policies: which pages of other requests a new request may share. They never see tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from attrs import field, frozen
from attrs.validators import instance_of

from headstock.spi.arrays import Ints
from headstock.spi.int_set import IntSet
from headstock.spi.kv import KVGroup, LayoutKind
from headstock.spi.plugin import PluginSpec


@frozen(kw_only=True)
class CacheCapabilities:
    """What a policy can do.

    page_sizes: in tokens
    layouts: of the KV groups that it indexes; with a state it indexes snapshots
    windows: whether it indexes groups that keep a window of the latest tokens
    reuse: whether it ever shares a page
    """

    page_sizes: IntSet
    layouts: frozenset[LayoutKind]
    windows: bool
    reuse: bool


@frozen(kw_only=True)
class CacheSpec(PluginSpec):
    """A cache policy as its entry point returns it; `implementation` names a `CachePolicy`."""

    capabilities: CacheCapabilities = field(validator=instance_of(CacheCapabilities))


@frozen(eq=False)
class Match:
    """A prefix found in the index: its pages in order, and the handle that stands for its end.

    pages: [groups, n] int32. A row of a group that keeps all tokens is whole. In a window group
        the pages are those from `KVGroup.first_kept_page` on; those before it are 0: not kept.
        In a group that keeps a state the last one is the snapshot there, and the others are 0.
    num_known: how many pages of the keys are indexed, which is more than n where a prefix of
        another request goes on without what a match needs
    """

    # Whole pages: a page has one owner for writing, so half of one cannot be shared
    # (docs/decisions/0004-prefix-tree.md).
    pages: Ints
    handle: Any
    num_known: int = 0


@frozen(eq=False)
class Inserted:
    """The result of an insertion.

    canonical: [groups, n] int32, the page that now stands for each inserted page's tokens: another
        one where the index had these tokens already, and 0 where 0 was inserted
    handle: the new end of the prefix
    """

    canonical: Ints
    handle: Any


@frozen(kw_only=True)
class CacheStats:
    """Counts of an index by KV group: its pages, and those of them that `evict` may not return."""

    pages: tuple[int, ...]
    held: tuple[int, ...]


class CachePolicy(ABC):
    """Policy over an index that it alone understands.

    Core passes the index in, and the policy may write it in place. What it compares are *keys*, one
    int32 for each token: the token's id, or the hash of a content that a token stands for. Keys of
    one `namespace`, a tenant, are never matched in another. Handles are opaque to core. `pages` has
    a row for each KV group.

    In groups that keep all tokens, a hold on a handle protects all pages from the root to that
    handle from eviction. In window groups pages are held one by one: by `insert`, and between
    `hold_pages` and `release_pages`. In groups that keep a state a page is a *snapshot*, the state
    behind the tokens of a prefix. Rows copy it, so none is ever held.
    """

    @abstractmethod
    def __init__(self, page_size: int, groups: Sequence[KVGroup], options: Any = None) -> None:
        """A policy for pages of `page_size` tokens.

        groups: of the model; each is of a layout, and of windows, that the spec claims
        """

    @abstractmethod
    def new_index(self) -> Any:
        """An empty index."""

    @abstractmethod
    def match_prefix(self, index: Any, keys: Ints, namespace: str) -> Match:
        """The longest indexed prefix of whole pages of `keys`. A caller sees no change.

        It ends where each group still has all pages that the next token reads.

        keys: [n] int32
        """

    @abstractmethod
    def hold(self, index: Any, handle: Any) -> None:
        """Protect the pages up to `handle` from eviction until `release` was called as often.

        Not those of window groups.
        """

    @abstractmethod
    def release(self, index: Any, handle: Any) -> None:
        """Undo one hold of `handle`. The pages of window groups were released before."""

    @abstractmethod
    def insert(self, index: Any, handle: Any, keys: Ints, pages: Ints, namespace: str) -> Inserted:
        """Index whole pages that follow `handle` (None: the root); the hold moves to the new one.

        A page of 0 is one that the row has no more, in a window group, and every page of a group
        that keeps a state: its snapshots come by `add_snapshot`. The canonical pages of window
        groups are held from now on.

        keys: [n * page_size] int32    pages: [groups, n] int32
        """

    def insert_each(
        self,
        index: Any,
        handles: Sequence[Any],
        counts: Sequence[int],
        keys: Ints,
        pages: Ints,
        namespaces: Sequence[str],
    ) -> tuple[Ints, list[Any]]:
        """`insert` for each row in turn: `counts[i]` pages behind `handles[i]`.

        There is no need to write another, but core calls this in every step, so that a short loop
        pays.

        keys: [sum of counts, page_size] int32    pages: [groups, sum of counts] int32
        returns: what each page now is, [groups, sum of counts] int32 (`pages` itself where nothing
            differs); the new handles
        """
        import numpy as np

        # A policy that does better saves some 2 us for each page that fills
        # (docs/decisions/0013-owned-pages.md).
        canonical, ends, stop = [], [], 0
        for handle, count, namespace in zip(handles, counts, namespaces, strict=True):
            start, stop = stop, stop + count
            inserted = self.insert(
                index, handle, keys[start:stop].reshape(-1), pages[:, start:stop], namespace
            )
            canonical.append(inserted.canonical)
            ends.append(inserted.handle)
        return np.concatenate(canonical, axis=1), ends

    def hold_pages(self, index: Any, group: int, pages: Ints) -> None:
        """Protect pages of a window group from eviction: the first row takes them.

        Only policies that claim windows need this and `release_pages`.

        pages: [n] int32, of a match or of `insert`
        """
        raise NotImplementedError(f"{type(self).__name__} claims windows and has no hold_pages")

    def release_pages(self, index: Any, group: int, pages: Ints) -> None:
        """Allow to evict pages of a window group: the last row let them go.

        pages: [n] int32, in the order of their tokens
        """
        raise NotImplementedError(f"{type(self).__name__} claims windows and has no release_pages")

    def add_snapshot(self, index: Any, handle: Any, num_pages: int, pages: Ints) -> Ints:
        """Index the states behind the first `num_pages` pages of a held prefix.

        Only policies that claim states need this.

        handle: the end of the prefix or of one that goes on from there
        pages: [groups] int32, 0 in groups that keep no state
        returns: the snapshots that the index has now, [groups] int32: others where it had some
        """
        raise NotImplementedError(f"{type(self).__name__} claims states and has no add_snapshot")

    @abstractmethod
    def evict(self, index: Any, group: int, count: int) -> Sequence[Ints]:
        """Drop unheld pages, oldest use first, until `count` of `group` are gone, or all.

        What no match can reach without them goes with them; O(evicted log n).

        returns: by group, [n] int32
        """

    # Asked in every step, to tell the scheduler how many pages it may count on.
    @abstractmethod
    def count_evictable(self, index: Any, group: int) -> int:
        """How many pages of `group` `evict` could return now; O(1)."""

    @abstractmethod
    def evict_all(self, index: Any) -> Sequence[Ints]:
        """Drop every unheld page and return them all.   returns: by group, [n] int32"""

    @abstractmethod
    def stats(self, index: Any) -> CacheStats:
        """The counts of the index."""

    @abstractmethod
    def check_index(self, index: Any) -> None:
        """Raise AssertionError if the index contradicts itself. For tests, --debug-invariants."""

    @abstractmethod
    def indexed_pages(self, index: Any, group: int) -> Ints:
        """Every page of `group` in the index, in no order. For invariants and pictures; O(pages).

        returns: [n] int32
        """
