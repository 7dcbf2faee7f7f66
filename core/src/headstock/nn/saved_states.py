"""Where states behind single tokens go, from which sequences go on later."""

from __future__ import annotations

from attrs import frozen
from torch import Tensor

from headstock.spi import Batch


@frozen(eq=False)
class SavedStates:
    """The pages of one KV group for states behind tokens of a step.

    tokens, pages: [m] int64, as `Batch.saved_tokens` and `Batch.saved_pages`
    by_token: [tokens + 1] int64, the page of each token; 0 for none, and for nobody's token
    """

    tokens: Tensor
    pages: Tensor
    by_token: Tensor

    @classmethod
    def of(cls, batch: Batch, group: int) -> SavedStates | None:
        """Those of a step; None where it saves none."""
        tokens = batch.saved_tokens
        if tokens is None:
            return None
        pages = batch.saved_pages[group]
        assert pages is not None, "the layers of a group with a state keep one"
        # The largest, as entries for nobody name page 0 and any token.
        by_token = pages.new_zeros(len(batch.tokens) + 1)
        by_token.scatter_reduce_(0, tokens, pages, "amax")
        return cls(tokens, pages, by_token)
