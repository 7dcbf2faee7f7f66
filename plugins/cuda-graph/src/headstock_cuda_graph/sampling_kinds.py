"""The kinds of sampling that are captured, each by the settings and rules that it reads."""

from __future__ import annotations

from attrs import frozen

WARM = frozenset({"temperature"})
TRUNCATED = WARM | {"top_k", "top_p", "min_p"}

ALL_PROCESSED = "processed"
"""The rule by which logits processors work on all rows of a step, which few steps need."""


@frozen
class SamplingKinds:
    """The kinds, smaller ones first.

    first: captured before the first step. The others are captured when a step first asks for one
    """

    # A graph for all kinds would make noise over the vocabulary for greedy rows too, and one for
    # each combination would cost memory and capture time.
    kinds: tuple[frozenset[str], ...]
    first: tuple[frozenset[str], ...]

    @classmethod
    def list(cls, rules: frozenset[str]) -> SamplingKinds:
        """List the kinds of an engine whose rows may have these rules (`Program.rules`)."""
        plain = (frozenset[str](), WARM, TRUNCATED)
        if not rules:
            return cls(plain, plain[:2])
        # Rules are neutral for rows that ask for none, so that no mix needs a kind of its own.
        few = rules - {ALL_PROCESSED}
        ruled = tuple(dict.fromkeys((WARM | few, TRUNCATED | few, TRUNCATED | rules)))
        return cls((*plain, *ruled), (*plain[:2], ruled[0]))

    def find(self, settings: frozenset[str]) -> frozenset[str]:
        """Find the smallest kind that has all of these."""
        return next(kind for kind in self.kinds if settings <= kind)
