"""Guesses of a second model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headstock.spi import DraftModel, Proposer, ProposerContext
from headstock.spi.arrays import Ints
from headstock_draft_proposer.options import DraftOptions


class DraftProposer(Proposer):
    """Proposes what a second model would say."""

    def __init__(self, options: DraftOptions) -> None:
        self.options = options
        self.model: DraftModel | None = None
        self.vocab = 0

    @property
    def max_drafts(self) -> int:
        """Set the options."""
        return self.options.max_drafts

    def start(self, context: ProposerContext) -> None:
        """Serve the second model.

        raises: ValueError for another vocabulary; what its start raises
        """
        settings = {"memory_ratio": self.options.memory_ratio}
        self.model = context.open_model(context.draft_model, settings)
        self.vocab = context.vocab
        # Tables of one tokenizer are padded to different lengths; more than that is another one.
        if not _is_padded_alike(self.model.vocab, context.vocab):
            raise ValueError(
                f"draft_model (--draft-model) {context.draft_model} has {self.model.vocab} token "
                f"ids, and the model {context.vocab}; name a model of the same vocabulary"
            )

    def propose(self, tokens: Sequence[Ints], room: Ints, ids: Ints) -> tuple[Ints, Ints]:
        """Guess as many tokens as there is room for."""
        if self.model is None:  # without a context, as in checks, nothing is known
            return np.zeros(len(room), np.int32), np.zeros(0, np.int32)
        drafts = self.model.continue_rows(tokens, np.minimum(room, self.max_drafts))
        drafts = [_cut_unknown(draft, self.vocab) for draft in drafts]
        counts = np.array([len(draft) for draft in drafts], np.int32)
        return counts, np.concatenate([np.zeros(0, np.int32), *drafts])

    def close(self) -> None:
        """End the second model."""
        if self.model is not None:
            self.model.close()
            self.model = None


MOST_PADDING = 1024
"""Token ids by which tables of one vocabulary differ, at most."""


def _is_padded_alike(one: int, other: int) -> bool:
    """Whether two numbers of token ids may be of one vocabulary."""
    return abs(one - other) <= MOST_PADDING


def _cut_unknown(draft: Ints, vocab: int) -> Ints:
    """The draft up to the first token that the large model lacks."""
    unknown = (draft >= vocab).nonzero()[0]
    return draft[: unknown[0]] if len(unknown) else draft
