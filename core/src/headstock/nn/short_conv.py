"""A causal convolution over a few tokens, each channel by itself; its latest inputs are a state."""

from __future__ import annotations

from functools import reduce

import torch
from attrs import frozen
from torch import Tensor

from headstock.nn.saved_states import SavedStates
from headstock.spi import Batch


@frozen(eq=False)
class ConvInputs:
    """Where the inputs of a step's tokens lie: among its rows' states, and among the tokens.

    Both lie one after the other behind a row of zeros, which stands for what comes before a
    sequence. Where each row has one token, as in decode steps, nothing has to be looked for.

    pages: [n] int64, the pages of the rows' states
    is_first: [n, 1, 1] bool, rows whose state is another sequence's
    sources: [taps, tokens] int64, of each token's inputs, the oldest first; or None
    kept: [n, taps - 1] int64, of what becomes each row's state; or None
    saved: where states behind single tokens go; None where none does
    saved_inputs: [m, taps - 1] int64, of what becomes these states
    """

    pages: Tensor
    is_first: Tensor
    sources: Tensor | None
    kept: Tensor | None
    saved: SavedStates | None = None
    saved_inputs: Tensor | None = None

    @classmethod
    def of(cls, batch: Batch, group: int, taps: int) -> ConvInputs:
        """Those of a step. A graph may capture it: it never reads the device.

        group: the layer's, which keeps a state
        """
        pages = batch.state_pages[group]
        assert pages is not None, "the layers of a group with a state keep one"
        is_first = (batch.starts == 0)[:, None, None]
        num_rows, num_tokens = len(pages), len(batch.tokens)
        saved = SavedStates.of(batch, group)
        if batch.max_query_len == 1 and num_rows == num_tokens and saved is None:
            return cls(pages, is_first, None, None)
        device, size, ends = pages.device, taps - 1, batch.query_start[1:].long()
        at = torch.arange(num_tokens, device=device)
        # Tokens past the last row's are padding, at position 0 of no row.
        rows = torch.searchsorted(ends, at, right=True).clamp_(max=num_rows - 1)
        # Behind the zeros a row's state, then the next one's; behind all of them the tokens.
        state_ends = 1 + size * torch.arange(1, num_rows + 1, device=device)
        first_token = 1 + num_rows * size
        within, counts = at - batch.query_start[rows], batch.query_start.diff()[:, None]
        back = torch.arange(size, -1, -1, device=device)[:, None]
        sources = torch.where(
            within >= back, first_token + at - back, state_ends[rows] + within - back
        ).masked_fill_(batch.positions < back, 0)
        back = torch.arange(size, 0, -1, device=device)
        kept = torch.where(
            counts >= back, first_token + ends[:, None] - back, state_ends[:, None] + counts - back
        ).masked_fill_(batch.starts[:, None] + counts < back, 0)
        if saved is None:
            return cls(pages, is_first, sources, kept)
        # A token's state is its own input and the ones before it, but for the oldest.
        saved_inputs = sources[1:].t()[saved.tokens]
        return cls(pages, is_first, sources, kept, saved, saved_inputs)


def convolve_(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, inputs: ConvInputs
) -> Tensor:
    """The convolution of a step's tokens, each over its own and the ones before it.

    Sums are in float32 and in one order, so a chunk or a neighbour changes no bit. A row that
    begins does not read what its page holds.

    x, result: [tokens, width]    weight: [taps, width]    bias: [width] or None
    writes: state [pages, taps - 1, width], at the rows' pages and where states are saved
    """
    old, rows = state[inputs.pages], weight.float()
    if inputs.sources is None or inputs.kept is None:
        # By `where` and not a product with 0: what another sequence left behind may be NaN.
        parts = [*torch.where(inputs.is_first, 0, old).unbind(1), x]
        state[inputs.pages] = torch.stack(parts[1:], 1)
        products = (part.float() * row for part, row in zip(parts, rows, strict=True))
    else:
        known = torch.cat((x.new_zeros(1, x.shape[1]), old.flatten(0, 1), x))
        state[inputs.pages] = known[inputs.kept]
        if inputs.saved is not None:
            state[inputs.saved.pages] = known[inputs.saved_inputs]
        # One after the other, each in place of what was gathered: for a long prompt the copies
        # are the largest tensors of the layer.
        products = (
            known.index_select(0, source).float().mul_(row)
            for source, row in zip(inputs.sources, rows, strict=True)
        )
    total: Tensor = reduce(torch.Tensor.add_, products)
    return (total if bias is None else total.add_(bias)).to(x.dtype)
