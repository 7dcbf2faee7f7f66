"""Sums of what pages hold, by which a write to them shows without a copy of them."""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from headstock.spi import KVLayer

PATTERN = 0x5A5A5A5A5A5A5A5A
"""A word of a slot that is to be written; no kernel gives a whole vector of them."""

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)

# A page of contiguous mode is as long as the longest sequence. To read all of it, several times a
# layer, would take many times what the step itself reads.
_MOST_PAGE_BYTES = 256 * 1024
_MARGIN = 64


@frozen(eq=False)
class PageSums:
    """Sums of words that pages held at one time.

    reached: [pages, slots, parts, heads], those of the slots that are always watched
    rest: [slots, parts, heads], those of the page whose turn it is; None when it is none's
    """

    reached: Tensor
    rest: Tensor | None

    def equals(self, other: PageSums) -> bool:
        """Whether nothing was written in between."""
        return self.equals_in_rest(other) and torch.equal(self.reached, other.reached)

    def equals_in_rest(self, other: PageSums) -> bool:
        """Whether nothing was written past the slots that are always watched."""
        return self.rest is None or other.rest is None or torch.equal(self.rest, other.rest)


class WatchedPages:
    """Pages of one KV group that are watched.

    Pages too large to be read whole are watched up to `_MARGIN` slots past the longest context. Of
    the slots behind, those of one page in one layer are watched each step, in turn.

    A sum is of one vector: of one head, slot and part. It shows every write but one: of the same
    words in another order.
    """

    def __init__(
        self, pages: Tensor, vectors: Tensor, context: int, *, step: int, num_layers: int
    ) -> None:
        """Watch these pages in one step.

        pages: [n] int64
        vectors: of any of the group's layers, as `view_vectors` returns them
        context: how many slots of a page the step reaches
        step: which step it is, for the turns
        """
        self.pages = pages
        num_slots = vectors.shape[1]
        is_large = len(pages) > 0 and vectors[0].nbytes > _MOST_PAGE_BYTES
        self.stop = min(num_slots, context + _MARGIN) if is_large else num_slots
        # Where pages are large they are few. So each is summed in place, and not gathered.
        self.numbers: list[int] = pages.tolist() if is_large else []
        self.turn, self.layer = divmod(step, num_layers)

    def sum_words(self, vectors: Tensor, layer: int) -> PageSums:
        """Sum what the pages of a layer hold."""
        if not self.numbers:
            return PageSums(vectors.index_select(0, self.pages).sum(-1), None)
        reached = torch.stack([vectors[page, : self.stop].sum(-1) for page in self.numbers])
        if layer != self.layer or self.stop == vectors.shape[1]:
            return PageSums(reached, None)
        return PageSums(reached, vectors[self.rest_page, self.stop :].sum(-1))

    @property
    def rest_page(self) -> int:
        """The page whose turn it is to be watched whole."""
        return self.numbers[self.turn % len(self.numbers)]

    def find_page(self, now: PageSums, before: PageSums) -> int:
        """The first page whose sums differ."""
        entries = (now.reached != before.reached).flatten(1).any(1).nonzero()
        return int(self.pages[int(entries[0])]) if len(entries) else self.rest_page


def view_words(tensor: Tensor) -> Tensor:
    """View a tensor by words, as wide as its last dimension allows; NaN is equal to itself then."""
    layout = (tensor.storage_offset(), tensor.shape[-1], *tensor.stride()[:-1])
    for dtype in _WORDS:
        if all(number * tensor.itemsize % dtype.itemsize == 0 for number in layout):
            break
    return tensor.view(dtype)


def view_vectors(pool: Tensor, kv: KVLayer) -> tuple[Tensor, ...]:
    """View what a layer keeps of tokens by words: each [pages, slots, parts, heads, words].

    Keys and values of one width are the two parts of one view. Of two widths they are two views.
    """
    if kv.latent is not None:
        return (view_words(kv.latent)[:, :, None, None],)
    # One view and not two where that can be: each costs calls in every layer.
    if pool.dim() == 5:
        return (view_words(pool).transpose(1, 2),)
    return tuple(view_words(part)[:, :, None] for part in (kv.k, kv.v) if part is not None)


def pattern_of(vectors: Tensor) -> int:
    """The pattern as one word of the view."""
    return PATTERN & ((1 << 8 * vectors.itemsize) - 1)


def pattern_sum(vectors: Tensor) -> int:
    """The sum of a vector of the view that holds the pattern; sums are meant modulo 2**64."""
    total = pattern_of(vectors) * vectors.shape[-1]
    return (total + 2**63) % 2**64 - 2**63
