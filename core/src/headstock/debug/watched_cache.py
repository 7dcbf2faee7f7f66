"""A cache policy whose answers are compared with what was inserted, for `--debug-invariants`."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NoReturn

import numpy as np
from attrs import define, frozen

from headstock.errors import PluginBroken
from headstock.spi import CachePolicy, CacheStats, Inserted, Match
from headstock.spi.arrays import Ints


@frozen(eq=False)
class WatchedHandle:
    """A handle of the policy, and the digests of the prefix up to each of its pages.

    digest: of the whole prefix
    """

    inner: Any
    digest: bytes
    digests: tuple[bytes, ...]


@define(eq=False)
class WatchedIndex:
    """An index of the policy; by KV group, the digest of the prefix that each page ends."""

    inner: Any
    digests: list[dict[int, bytes]]


class WatchedPolicy(CachePolicy):
    """Answers as `inner` does, and raises PluginBroken for pages that stand for something else.

    A page is known by a digest of its namespace and of all keys up to its end.
    """

    def __init__(self, inner: CachePolicy, name: str, num_groups: int, page_size: int) -> None:
        self.inner = inner
        self.name = name
        self.num_groups = num_groups
        self.page_size = page_size

    def new_index(self) -> WatchedIndex:
        """An empty index."""
        return WatchedIndex(self.inner.new_index(), [{} for _ in range(self.num_groups)])

    def match_prefix(self, index: WatchedIndex, keys: Ints, namespace: str) -> Any:
        """Return the match of `inner`.   raises: PluginBroken for pages of other keys"""
        match = self.inner.match_prefix(index.inner, keys, namespace)
        pages = getattr(match, "pages", None)
        if not isinstance(match, Match) or not isinstance(pages, np.ndarray) or pages.ndim != 2:
            return match  # core says what is wrong with it
        digests = self._digest_pages(
            _root_digest(namespace), keys[: pages.shape[1] * self.page_size]
        )
        for group, numbers in enumerate(pages.tolist()):
            for page, digest in zip(numbers, digests, strict=False):
                if page and index.digests[group].get(page) != digest:
                    self._blame(
                        f"matched page {page} of KV group {group}, which stands for other tokens "
                        "or is another tenant's"
                    )
        end = digests[-1] if digests else _root_digest(namespace)
        handle = None if match.handle is None else WatchedHandle(match.handle, end, tuple(digests))
        return Match(pages, handle, match.num_known)

    def hold(self, index: WatchedIndex, handle: WatchedHandle) -> None:
        """Hold the handle of `inner`."""
        self.inner.hold(index.inner, handle.inner)

    def release(self, index: WatchedIndex, handle: WatchedHandle) -> None:
        """Release the handle of `inner`."""
        self.inner.release(index.inner, handle.inner)

    def insert(
        self, index: WatchedIndex, handle: Any, keys: Ints, pages: Ints, namespace: str
    ) -> Inserted:
        """Insert the pages of one row."""
        rows = keys.reshape(-1, self.page_size)
        canonical, (end,) = self.insert_each(index, [handle], [len(rows)], rows, pages, [namespace])
        return Inserted(canonical, end)

    def insert_each(
        self,
        index: WatchedIndex,
        handles: Sequence[Any],
        counts: Sequence[int],
        keys: Ints,
        pages: Ints,
        namespaces: Sequence[str],
    ) -> Any:
        """Insert as `inner` does.   raises: PluginBroken where its pages stand for other keys"""
        answer = self.inner.insert_each(
            index.inner,
            [handle.inner if handle is not None else None for handle in handles],
            counts,
            keys,
            pages,
            namespaces,
        )
        is_pair = isinstance(answer, tuple) and len(answer) == 2
        if not is_pair or np.shape(answer[0]) != pages.shape or len(answer[1]) != len(handles):
            return answer  # core says what is wrong with it
        canonical, ends = answer
        stop, digests, watched = 0, [], []
        for handle, count, namespace, end in zip(handles, counts, namespaces, ends, strict=True):
            start, stop = stop, stop + count
            first = _root_digest(namespace) if handle is None else handle.digest
            new = self._digest_pages(first, keys[start:stop].reshape(-1))
            digests += new
            earlier = () if handle is None else handle.digests
            watched.append(WatchedHandle(end, new[-1] if new else first, (*earlier, *new)))
        for group in range(self.num_groups):
            self._note_pages(index.digests[group], group, pages, canonical, digests)
        return canonical, watched

    def _note_pages(
        self,
        known: dict[int, bytes],
        group: int,
        pages: Ints,
        canonical: Ints,
        digests: Sequence[bytes],
    ) -> None:
        """Note what the inserted pages stand for.   raises: PluginBroken"""
        pairs = zip(pages[group].tolist(), canonical[group].tolist(), digests, strict=True)
        for own, kept, digest in pairs:
            if own and kept == own:
                known[own] = digest
            elif kept and known.get(kept) != digest:
                self._blame(
                    f"put page {kept} of KV group {group} for page {own}, though it "
                    "stands for other tokens or is another tenant's"
                )

    def add_snapshot(
        self, index: WatchedIndex, handle: WatchedHandle, num_pages: int, pages: Ints
    ) -> Any:
        """Add as `inner` does.   raises: PluginBroken where its pages stand for other keys"""
        answer = self.inner.add_snapshot(index.inner, handle.inner, num_pages, pages)
        if not isinstance(answer, np.ndarray) or answer.shape != pages.shape:
            return answer  # core says what is wrong with it
        digests = handle.digests[num_pages - 1 : num_pages]
        for group in range(self.num_groups):
            known = index.digests[group]
            self._note_pages(known, group, pages[:, None], answer[:, None], digests)
        return answer

    def hold_pages(self, index: WatchedIndex, group: int, pages: Ints) -> None:
        """Hold pages of a window group."""
        self.inner.hold_pages(index.inner, group, pages)

    def release_pages(self, index: WatchedIndex, group: int, pages: Ints) -> None:
        """Release pages of a window group."""
        self.inner.release_pages(index.inner, group, pages)

    def evict(self, index: WatchedIndex, group: int, count: int) -> Any:
        """Evict as `inner` does.   raises: PluginBroken for pages that it was not given"""
        return self._forget(index, self.inner.evict(index.inner, group, count))

    def evict_all(self, index: WatchedIndex) -> Any:
        """Evict all as `inner` does.   raises: PluginBroken for pages that it was not given"""
        return self._forget(index, self.inner.evict_all(index.inner))

    def _forget(self, index: WatchedIndex, pages: Any) -> Any:
        """Forget evicted pages.   raises: PluginBroken"""
        if not isinstance(pages, list | tuple) or len(pages) != self.num_groups:
            return pages  # core says what is wrong with it
        for group, numbers in enumerate(pages):
            for page in np.asarray(numbers).reshape(-1).tolist():
                if index.digests[group].pop(page, None) is None:
                    self._blame(f"evicted page {page} of KV group {group}, which it does not have")
        return pages

    def count_evictable(self, index: WatchedIndex, group: int) -> int:
        """Count as `inner` does."""
        return self.inner.count_evictable(index.inner, group)

    def stats(self, index: WatchedIndex) -> CacheStats:
        """The counts of `inner`."""
        return self.inner.stats(index.inner)

    def check_index(self, index: WatchedIndex) -> None:
        """Check as `inner` does."""
        self.inner.check_index(index.inner)

    def indexed_pages(self, index: WatchedIndex, group: int) -> Ints:
        """The pages that `inner` lists."""
        return self.inner.indexed_pages(index.inner, group)

    def _digest_pages(self, digest: bytes, keys: Ints) -> list[bytes]:
        """The digests of the prefixes that end with each whole page of keys, behind `digest`."""
        digests = []
        for start in range(0, len(keys) - self.page_size + 1, self.page_size):
            page = np.ascontiguousarray(keys[start : start + self.page_size], np.int32)
            digest = blake2b(digest + page.tobytes(), digest_size=16).digest()
            digests.append(digest)
        return digests

    def _blame(self, fault: str) -> NoReturn:
        """Raise PluginBroken that names the policy."""
        raise PluginBroken(
            f"the cache plugin {self.name!r} {fault}; report it to its author or pick another "
            "cache_type (--cache-type)"
        )


def _root_digest(namespace: str) -> bytes:
    """The digest of the empty prefix of a namespace."""
    return blake2b(namespace.encode("utf-8", "surrogatepass"), digest_size=16).digest()
