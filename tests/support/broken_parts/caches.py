"""Cache policies that are each wrong in one way."""

from __future__ import annotations

from typing import Any

import numpy as np

from headstock.spi import Match
from headstock_radix_cache.policy import RadixCache


class CannotBeMade(RadixCache):
    def __init__(self, page_size: int, groups: Any, options: Any = None) -> None:
        raise KeyError("page_bytes")


class NoIndex(RadixCache):
    def new_index(self) -> Any:
        raise TypeError("roots() takes 1 argument")


class Raises(RadixCache):
    def match_prefix(self, *arguments: Any) -> Match:
        raise KeyError("root")


class MatchesNone(RadixCache):
    def match_prefix(self, *arguments: Any) -> Any:
        return None


class MatchesList(RadixCache):
    def match_prefix(self, *arguments: Any) -> Any:
        return Match([[1, 2]], None)  # type: ignore[arg-type]


class MatchesPastPool(RadixCache):
    def match_prefix(self, *arguments: Any) -> Match:
        return Match(np.array([[5000]], np.int32), None)


class MatchesLatest(RadixCache):
    """Two pages of whatever was inserted last, whoever asks."""

    latest: Any = None

    def insert_each(self, index: Any, handles: Any, counts: Any, keys: Any, *more: Any) -> Any:
        if self.latest is None and len(keys) >= 2:
            self.latest = keys[:2].reshape(-1).copy()
        return super().insert_each(index, handles, counts, keys, *more)

    def match_prefix(self, index: Any, keys: Any, namespace: str) -> Match:
        if self.latest is None or len(keys) < len(self.latest):
            return super().match_prefix(index, keys, namespace)
        return super().match_prefix(index, self.latest, namespace)


class IgnoresNamespaces(RadixCache):
    def match_prefix(self, index: Any, keys: Any, namespace: str) -> Match:
        return super().match_prefix(index, keys, "")

    def insert_each(
        self, index: Any, handles: Any, counts: Any, keys: Any, pages: Any, namespaces: Any
    ) -> Any:
        return super().insert_each(index, handles, counts, keys, pages, [""] * len(handles))


class WritesKeys(RadixCache):
    def match_prefix(self, index: Any, keys: Any, namespace: str) -> Match:
        keys.sort()
        return super().match_prefix(index, keys, namespace)


class CountsNone(RadixCache):
    def count_evictable(self, index: Any, group: int) -> Any:
        return None


class CountsTooMany(RadixCache):
    def count_evictable(self, index: Any, group: int) -> int:
        return super().count_evictable(index, group) + 3


class InsertsNothing(RadixCache):
    def insert_each(self, *arguments: Any) -> Any:
        super().insert_each(*arguments)
        return None


class NeverReleases(RadixCache):
    def release(self, index: Any, handle: Any) -> None:
        pass


class ReversesPages(RadixCache):
    def match_prefix(self, index: Any, keys: Any, namespace: str) -> Match:
        match = super().match_prefix(index, keys, namespace)
        return Match(np.ascontiguousarray(match.pages[:, ::-1]), match.handle)


class FirstForAll(RadixCache):
    first: Any = None

    def insert_each(self, *arguments: Any) -> Any:
        canonical, ends = super().insert_each(*arguments)
        if self.first is None:
            self.first = canonical[:, :1].copy()
        return np.repeat(self.first, canonical.shape[1], axis=1), ends


class EvictsTwice(RadixCache):
    def evict_all(self, index: Any) -> Any:
        return [np.concatenate([pages, pages]) for pages in super().evict_all(index)]


class EvictsUnknown(RadixCache):
    def evict_all(self, index: Any) -> Any:
        return [np.append(pages, np.int32(60)) for pages in super().evict_all(index)]
