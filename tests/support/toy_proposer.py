"""A proposer for the toy model: it knows the next tokens, and falsifies some of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import frozen

from headstock.spi import Proposer, ProposerSpec, SpiRange
from headstock.spi.arrays import Ints
from headstock_conformance.scheduler.toy_device import VOCAB, next_token


@frozen(kw_only=True)
class ToyOptions:
    """How many drafts, what share of them is right, and what share of rows gets any."""

    drafts: int = 3
    right: float = 0.7
    asked: float = 0.8


def spec() -> ProposerSpec:
    """The proposer `guess`."""
    return ProposerSpec(
        name="guess",
        spi=SpiRange(0, 3),
        summary="knows the toy model",
        implementation="toy_proposer:ToyProposer",
        options="toy_proposer:ToyOptions",
    )


class ToyProposer(Proposer):
    """Guesses of random length, each right with some probability."""

    def __init__(self, options: ToyOptions) -> None:
        self.options = options
        self.rng = np.random.default_rng(0)

    @property
    def max_drafts(self) -> int:
        """As the options say."""
        return self.options.drafts

    def propose(self, tokens: Sequence[Ints], room: Ints, ids: Ints) -> tuple[Ints, Ints]:
        """Guess the greedy tokens, some of them falsified."""
        drafts: list[list[int]] = []
        for row, most in zip(tokens, room.tolist(), strict=True):
            draft: list[int] = []
            if self.rng.random() < self.options.asked:
                for _ in range(int(self.rng.integers(1, most + 1))):
                    right = next_token([*row.tolist(), *draft])
                    wrong = int(self.rng.integers(0, VOCAB))
                    draft.append(right if self.rng.random() < self.options.right else wrong)
            drafts.append(draft)
        counts = np.array([len(draft) for draft in drafts], np.int32)
        return counts, np.array([token for draft in drafts for token in draft], np.int32)
