"""Sets of positive integers, as capabilities state them: some numbers, multiples of one, or all."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import field, frozen


def to_sorted(values: Iterable[int]) -> tuple[int, ...]:
    """The values, each once, in ascending order."""
    return tuple(sorted(set(values)))


@frozen
class IntSet:
    """A set of positive integers: `values`; without any, the multiples of `step` up to `most`."""

    values: tuple[int, ...] = field(default=(), converter=to_sorted)
    step: int = 1
    most: int | None = None

    @classmethod
    def of(cls, *values: int) -> IntSet:
        """The set of just these values (at least one)."""
        if not values or min(values) < 1:
            raise ValueError(f"IntSet.of: expected one or more positive integers, got {values}")
        return cls(values)

    @classmethod
    def multiples(cls, step: int, most: int | None = None) -> IntSet:
        """step, 2 * step, ... up to `most` (without end when None)."""
        return cls((), step, most)

    @classmethod
    def all(cls) -> IntSet:
        """Every positive integer."""
        return cls()

    def __contains__(self, value: int) -> bool:
        if self.values:
            return value in self.values
        return value >= 1 and value % self.step == 0 and (self.most is None or value <= self.most)

    def __le__(self, other: IntSet) -> bool:
        """Whether the other set has all of this one."""
        if self.values:
            return all(value in other for value in self.values)
        if other.values:
            return self.most is not None and all(
                value in other for value in range(self.step, self.most + 1, self.step)
            )
        if other.most is not None and (
            self.most is None or self.most // self.step * self.step > other.most
        ):
            return False
        return self.step % other.step == 0 or (self.most is not None and self.most < self.step)

    def __str__(self) -> str:
        if self.values:
            return ", ".join(map(str, self.values))
        limit = "" if self.most is None else f" up to {self.most}"
        return f"any{limit}" if self.step == 1 else f"multiples of {self.step}{limit}"
