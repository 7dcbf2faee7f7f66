"""Whether all ranks do the same steps, with the same results, in time."""

from __future__ import annotations

from collections.abc import Callable

from attrs import define, field

SKEW_SECONDS = 5.0
"""How much later a step may fail on one rank than on another; else it failed there alone."""


@define(eq=False)
class _AskedStep:
    """A step that some rank has still to do.   results, errors: by rank, of those that have"""

    asked_at: float
    results: dict[int, int] = field(factory=dict)
    errors: dict[int, str] = field(factory=dict)
    failed_at: float = 0.0


class StepChecks:
    """Compares what ranks report of each step.

    patience: seconds that a step may take
    name_rank: how errors name a rank
    """

    def __init__(self, count: int, patience: float, name_rank: Callable[[int], str]) -> None:
        self.count = count
        self.patience = patience
        self.name_rank = name_rank
        self._num_asked = 0
        self._steps: dict[int, _AskedStep] = {}
        self._fault = ""

    def ask(self, now: float) -> int:
        """Note a step that all ranks are asked for, and return its number."""
        self._num_asked += 1
        self._steps[self._num_asked] = _AskedStep(now)
        return self._num_asked

    def report(self, rank: int, number: int, result: int, error: str, now: float) -> None:
        """Note that a rank has done a step.

        result: what must be equal on all ranks
        error: why the step failed there; empty if it did not
        """
        step = self._steps.get(number)
        if step is None:
            self._fault = self._fault or f"{self.name_rank(rank)} reports step {number} twice"
            return
        if error:
            step.errors[rank] = error
            step.failed_at = step.failed_at or now
        else:
            step.results[rank] = result
        if len(step.results) + len(step.errors) < self.count:
            return
        del self._steps[number]
        # A step that failed alike on all ranks failed at one place, and they go on. Otherwise one
        # may have begun a sum that the others have not, and would get another sum's numbers next.
        if step.results or len(set(step.errors.values())) > 1:
            self._fault = self._fault or self._compare(step)

    @property
    def is_wrong(self) -> bool:
        """Whether ranks differ in a step that all have done."""
        return bool(self._fault)

    def is_over(self, number: int) -> bool:
        """Whether all ranks have done a step."""
        return number not in self._steps

    def find_fault(self, now: float) -> str:
        """Describe what no engine can go on with; empty for nothing."""
        for step in self._steps.values():
            if step.errors and (step.results or now - step.failed_at > SKEW_SECONDS):
                return self._fault or self._compare(step)
            if now - step.asked_at > self.patience:
                missing = set(range(self.count)) - step.results.keys() - step.errors.keys()
                names = ", ".join(map(self.name_rank, sorted(missing)))
                return self._fault or f"a step has not ended for {self.patience:g} s on {names}"
        return self._fault

    def _compare(self, step: _AskedStep) -> str:
        """Describe how the ranks differ in a step."""
        if step.errors:
            rank, error = min(step.errors.items())
            return f"{self.name_rank(rank)} failed in a step: {error}"
        first = step.results.get(0)
        other = next((rank for rank, each in step.results.items() if each != first), None)
        if other is None:
            return ""
        return f"{self.name_rank(other)} got other results than rank 0 in a step"
