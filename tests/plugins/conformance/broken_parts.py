"""Caches, schedulers and proposers that are wrong in one way each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from attrs import evolve

from headstock.builtin import mixed
from headstock.spi import (
    Budget,
    CacheStats,
    DeviceEnv,
    Match,
    PartQuery,
    Proposer,
    Rejection,
    ScheduleDecision,
    View,
)
from headstock.spi.arrays import Ints
from headstock_ngram_proposer.options import NgramOptions
from headstock_ngram_proposer.proposer import NgramProposer
from headstock_radix_cache.policy import RadixCache


class NamespaceIgnored(RadixCache):
    """Shares pages between tenants."""

    def match_prefix(self, index: Any, keys: Ints, namespace: str) -> Match:
        return super().match_prefix(index, keys, "")

    def insert(self, index: Any, handle: Any, keys: Ints, pages: Ints, namespace: str) -> Any:
        return super().insert(index, handle, keys, pages, "")


class FirstKeysCompared(RadixCache):
    """Compares the first key of each page alone."""

    def blur(self, keys: Ints) -> Ints:
        whole = keys[: len(keys) // self.page_size * self.page_size]
        return whole.reshape(-1, self.page_size)[:, :1].repeat(self.page_size, 1).reshape(-1)

    def match_prefix(self, index: Any, keys: Ints, namespace: str) -> Match:
        return super().match_prefix(index, self.blur(keys), namespace)

    def insert(self, index: Any, handle: Any, keys: Ints, pages: Ints, namespace: str) -> Any:
        return super().insert(index, handle, self.blur(keys), pages, namespace)


class MatchShort(RadixCache):
    """Never gives the last page."""

    def match_prefix(self, index: Any, keys: Ints, namespace: str) -> Match:
        return super().match_prefix(index, keys[: -self.page_size], namespace)


class PagesReversed(RadixCache):
    """Gives the pages of a match in the wrong order."""

    def match_prefix(self, index: Any, keys: Ints, namespace: str) -> Match:
        found = super().match_prefix(index, keys, namespace)
        return Match(found.pages[:, ::-1].copy(), found.handle)


class HoldsForgotten(RadixCache):
    """Evicts what rows still read."""

    def hold(self, index: Any, handle: Any) -> None:
        pass

    def release(self, index: Any, handle: Any) -> None:
        pass

    def check_index(self, index: Any) -> None:
        pass


class PagesLost(RadixCache):
    """Keeps a page to itself when it evicts."""

    def evict(self, index: Any, group: int, count: int) -> Sequence[Ints]:
        return [pages[:-1] for pages in super().evict(index, group, count)]


class MatchHolds(RadixCache):
    """Holds what it matches from the 30th match on."""

    matches = 0

    def match_prefix(self, index: Any, keys: Ints, namespace: str) -> Match:
        found = super().match_prefix(index, keys, namespace)
        self.matches += 1
        if self.matches > 30:
            self.hold(index, found.handle)
        return found


class EvictAllKeepsOne(RadixCache):
    """Keeps a page when it evicts more than 25."""

    def evict_all(self, index: Any) -> Sequence[Ints]:
        return [
            self.evict(index, group, count - (count > 25))[group]
            for group in range(1)
            for count in [self.count_evictable(index, group)]
        ]


class LatePagesWrong(RadixCache):
    """Gives a page twice from the 37th on."""

    def match_prefix(self, index: Any, keys: Ints, namespace: str) -> Match:
        found = super().match_prefix(index, keys, namespace)
        pages = found.pages.copy()
        if pages.shape[1] > 37:
            pages[:, 37] = pages[:, 36]
        return Match(pages, found.handle)


class NamespacesCut(RadixCache):
    """Shares pages between tenants behind the 50th."""

    def find(self, namespace: str) -> str:
        names = vars(self).setdefault("names", {})
        return str(min(names.setdefault(namespace, len(names)), 50))

    def match_prefix(self, index: Any, keys: Ints, namespace: str) -> Match:
        return super().match_prefix(index, keys, self.find(namespace))

    def insert(self, index: Any, handle: Any, keys: Ints, pages: Ints, namespace: str) -> Any:
        return super().insert(index, handle, keys, pages, self.find(namespace))


class NamespacesShort(RadixCache):
    """Looks at the first 40 characters of a namespace."""

    def find(self, namespace: str) -> str:
        return namespace[:40]

    def match_prefix(self, index: Any, keys: Ints, namespace: str) -> Match:
        return super().match_prefix(index, keys, self.find(namespace))

    def insert(self, index: Any, handle: Any, keys: Ints, pages: Ints, namespace: str) -> Any:
        return super().insert(index, handle, keys, pages, self.find(namespace))


class NamespacesFolded(NamespacesShort):
    """Takes names in capitals for the same."""

    def find(self, namespace: str) -> str:
        return namespace.casefold()


class KeysNarrow(RadixCache):
    """Keeps 16 bits of a key."""

    def match_prefix(self, index: Any, keys: Ints, namespace: str) -> Match:
        return super().match_prefix(index, keys & 0xFFFF, namespace)

    def insert(self, index: Any, handle: Any, keys: Ints, pages: Ints, namespace: str) -> Any:
        return super().insert(index, handle, keys & 0xFFFF, pages, namespace)


class PagesNarrow(RadixCache):
    """Keeps 16 bits of a page's number."""

    def match_prefix(self, index: Any, keys: Ints, namespace: str) -> Match:
        found = super().match_prefix(index, keys, namespace)
        return Match(found.pages & 0xFFFF, found.handle)


class StatsWrong(RadixCache):
    """Counts held pages as free."""

    def stats(self, index: Any) -> CacheStats:
        stats = super().stats(index)
        return evolve(stats, held=tuple(0 for _ in stats.held))


class StatesMisplaced(RadixCache):
    """Takes a state for one of the whole prefix."""

    def add_snapshot(self, index: Any, handle: Any, num_pages: int, pages: Ints) -> Ints:
        return super().add_snapshot(index, handle, handle.depth, pages)


class StatesReplaced(RadixCache):
    """Says that a state is indexed where there was another."""

    def add_snapshot(self, index: Any, handle: Any, num_pages: int, pages: Ints) -> Ints:
        super().add_snapshot(index, handle, num_pages, pages)
        return pages


class BranchesUnknown(RadixCache):
    """Does not say how far the index goes on."""

    def match_prefix(self, index: Any, keys: Ints, namespace: str) -> Match:
        found = super().match_prefix(index, keys, namespace)
        return Match(found.pages, found.handle, found.pages.shape[1])


def starve(view: View, budget: Budget) -> ScheduleDecision:
    """Run the row of highest priority alone, and admit nobody beside it."""
    if len(view.rows_by_priority):
        decision = mixed.schedule(view, evolve(budget, free_rows=0))
        return evolve(decision, rows=decision.rows[:0], counts=decision.counts[:0])
    return mixed.schedule(view, budget)


CALLS: list[int] = []


def alternate(view: View, budget: Budget) -> ScheduleDecision:
    """Decide otherwise at each second call."""
    CALLS.append(view.step)
    decision = mixed.schedule(view, budget)
    if len(CALLS) % 2:
        return decision
    return evolve(decision, rows=decision.rows[::-1], counts=decision.counts[::-1])


def overspend(view: View, budget: Budget) -> ScheduleDecision:
    """Run every row with all of its tokens, whatever the budget."""
    rows = view.rows_by_priority[view.num_new_tokens[view.rows_by_priority] > 0]
    admit = np.arange(min(budget.free_rows, len(view.waiting_lengths)), dtype=np.int32)
    return ScheduleDecision(rows=rows, counts=view.num_new_tokens[rows], admit=admit)


class RoomIgnored(NgramProposer):
    """Always gives as many drafts as it may give at most."""

    def propose(self, tokens: Sequence[Ints], room: Ints, ids: Ints) -> tuple[Ints, Ints]:
        return super().propose(tokens, np.full_like(room, self.max_drafts), ids)


class AnswerReused(Proposer):
    """Gives the same arrays each time."""

    max_drafts = 2

    def __init__(self, options: NgramOptions) -> None:
        self.drafts = np.zeros(100, np.int32)

    def propose(self, tokens: Sequence[Ints], room: Ints, ids: Ints) -> tuple[Ints, Ints]:
        for at, row in enumerate(tokens):
            self.drafts[at] = row[-1]
        return np.ones(len(tokens), np.int32), self.drafts[: len(tokens)]


class TokensWritten(NgramProposer):
    """Appends its guess to the row."""

    def propose(self, tokens: Sequence[Ints], room: Ints, ids: Ints) -> tuple[Ints, Ints]:
        tokens[0][-1] = 3
        return super().propose(tokens, room, ids)


class BeyondVocabulary(NgramProposer):
    """Guesses the last id of a larger vocabulary."""

    def propose(self, tokens: Sequence[Ints], room: Ints, ids: Ints) -> tuple[Ints, Ints]:
        return np.ones_like(room), np.full_like(room, 1000)


def refuse_small(query: PartQuery, env: DeviceEnv) -> Any:
    """Serves vocabularies of 2,000 tokens and more."""
    if query.model.vocab >= 2000:
        return None
    return (Rejection(code="vocab", message=f"its drafts need 2000 ids, {query.model.vocab} are"),)
