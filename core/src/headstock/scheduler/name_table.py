"""Numbers for the names that requests in the engine have: of users, and of adapters."""

from __future__ import annotations

from heapq import heappop, heappush

from attrs import define, field


@define(eq=False)
class NameTable:
    """The numbers of the names in use, from 1; the empty name has 0.

    A name that no request has any more is forgotten, so the table is never longer than the requests
    are many.

    counts: by name, how many requests have it
    free: numbers below the largest that no name has, a heap
    """

    numbers: dict[str, int] = field(factory=dict)
    counts: dict[str, int] = field(factory=dict)
    free: list[int] = field(factory=list)

    def add(self, name: str) -> int:
        """Count one more request of the name; return the name's number."""
        if not name:
            return 0
        self.counts[name] = self.counts.get(name, 0) + 1
        number = self.numbers.get(name)
        if number is None:
            # The least free number, so that schedulers may use numbers as indices.
            number = heappop(self.free) if self.free else len(self.numbers) + 1
            self.numbers[name] = number
        return number

    def drop(self, name: str) -> None:
        """Count one request less; the last one's number is free again."""
        if not name:
            return
        self.counts[name] -= 1
        if not self.counts[name]:
            del self.counts[name]
            heappush(self.free, self.numbers.pop(name))
