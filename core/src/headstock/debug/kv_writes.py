"""Where operations write keys and values, and where they must not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NoReturn

import torch
from attrs import frozen
from torch import Tensor

from headstock.debug.page_sums import PageSums, WatchedPages, pattern_of, pattern_sum, view_vectors
from headstock.errors import PluginBroken
from headstock.spi import Batch, KVLayer, LayerConfig


@frozen(eq=False)
class WrittenSlots:
    """The slots of one KV group that a step writes; those of the dummy page are left out.

    pages, slots: [n] int64, each slot's page and its place there
    watched: the pages that they lie in
    entries: [n] int64, the entry of `watched` of each page
    is_written: [pages, slots, 1], which sums of `watched` shall change
    """

    pages: Tensor
    slots: Tensor
    watched: WatchedPages
    entries: Tensor
    is_written: Tensor

    @classmethod
    def of(cls, batch: Batch, kv: KVLayer, vectors: Tensor, step: int) -> WrittenSlots:
        """The slots of a batch in the group of a layer."""
        cells = batch.slots[kv.group]
        cells = cells[cells >= kv.page_slots]  # padding shares the dummy page
        pages, slots = cells // kv.page_slots, cells % kv.page_slots
        distinct, entries = torch.unique(pages, return_inverse=True)
        context = int(slots.max()) + 1 if len(slots) else 0
        watched = WatchedPages(distinct, vectors, context, step=step, num_layers=len(batch.kv))
        is_written = torch.zeros(
            (len(distinct), watched.stop, 1), dtype=torch.bool, device=cells.device
        )
        is_written[entries, slots] = True
        return cls(pages, slots, watched, entries, is_written)


class KVWrites:
    """The pages of a step's rows, layer by layer, and what they held before it.

    They are known by sums, which cost a tenth of copies. Pages that the step writes are summed
    before and behind the operation that writes them, others at the ends of the step alone.
    """

    def __init__(
        self, batch: Batch, who: str, step: int = 0, tables: Sequence[Tensor] = ()
    ) -> None:
        """Sum the pages of the batch's rows.

        who: the operations, as errors name them
        step: how many steps there were before
        tables: by KV group, the page tables of all rows; without them the pages that the step
            writes are watched alone
        """
        self.batch = batch
        self.who = who
        self.written: dict[int, WrittenSlots] = {}
        self.vectors: dict[int, tuple[Tensor, ...]] = {}
        self.before: dict[int, list[PageSums]] = {}
        self.after: dict[int, list[PageSums]] = {}
        self.others: dict[int, WatchedPages] = {}
        self.others_before: dict[int, list[PageSums]] = {}
        for layer, kv in enumerate(batch.kv):
            if kv.k is None and kv.latent is None:
                continue  # a state
            self.vectors[layer] = view_vectors(batch.pools[layer], kv)
            if kv.group not in self.written:
                first = self.vectors[layer][0]
                self.written[kv.group] = WrittenSlots.of(batch, kv, first, step)
                pages = self._find_others(kv.group, tables)
                self.others[kv.group] = WatchedPages(
                    pages, first, 0, step=step, num_layers=len(batch.kv)
                )
            self.before[layer] = self._sum_pages(layer)
            self.others_before[layer] = self._sum_others(layer)

    def _find_others(self, group: int, tables: Sequence[Tensor]) -> Tensor:
        """Find the pages of the batch's rows in which no slot of it lies.   returns: [n] int64"""
        own = self.written[group].watched.pages
        if not tables:
            return own[:0]
        pages: Tensor = torch.unique(tables[group][self.batch.row_ids]).long()
        return pages[(pages > 0) & ~torch.isin(pages, own)]

    def _sum_others(self, layer: int) -> list[PageSums]:
        """Sum what other pages of the layer hold, view by view."""
        others = self.others[self.batch.kv[layer].group]
        return [others.sum_words(vectors, layer) for vectors in self.vectors[layer]]

    def _sum_pages(self, layer: int) -> list[PageSums]:
        """Sum what the layer's pages hold, view by view."""
        watched = self._written(layer).watched
        return [watched.sum_words(vectors, layer) for vectors in self.vectors[layer]]

    def _written(self, layer: int) -> WrittenSlots:
        """The slots that the batch writes in a layer."""
        return self.written[self.batch.kv[layer].group]

    def _parts(self, layer: int) -> list[tuple[str, Tensor]]:
        """What the layer keeps of a token, by name: views of its pool, [pages, slots, ...]."""
        kv = self.batch.kv[layer]
        parts = (("keys", kv.k), ("values", kv.v), ("latent vectors", kv.latent))
        return [(name, part) for name, part in parts if part is not None]

    def read(self, layer: LayerConfig) -> list[Tensor]:
        """Copy what the slots hold, one tensor a part, [n, ...]."""
        written = self._written(layer.index)
        return [_index(part, written.pages, written.slots) for _, part in self._parts(layer.index)]

    def pair(
        self, layer: LayerConfig, expected: list[Tensor]
    ) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Pair what the slots hold with what they should, by the name of the part.

        returns: [n, numbers] of the pool's type, which says how far they may differ
        """
        names = [name for name, _ in self._parts(layer.index)]
        for name, stored, reference in zip(names, self.read(layer), expected, strict=True):
            yield name, stored.flatten(1), reference.flatten(1)

    def mark(self, layer: LayerConfig) -> None:
        """Fill the layer's slots with the pattern.   writes: the pool"""
        written = self._written(layer.index)
        for vectors, sums in zip(self.vectors[layer.index], self.before[layer.index], strict=True):
            vectors[written.pages, written.slots] = pattern_of(vectors)
            # A slot that is not written keeps this sum, and so shows.
            sums.reached[written.entries, written.slots] = pattern_sum(vectors)

    def check(self, layer: LayerConfig) -> None:
        """Raise PluginBroken unless the layer's slots were written, and nothing else."""
        number, written = layer.index, self._written(layer.index)
        now = self.after[number] = self._sum_pages(number)
        for view, (sums, before) in enumerate(zip(now, self.before[number], strict=True)):
            changed = (sums.reached != before.reached).any(-1)
            if not bool((changed == written.is_written).all()):
                self._explain(number, view, changed)
            if not sums.equals_in_rest(before):
                self._blame_page(number, written.watched.rest_page)

    def _explain(self, layer: int, view: int, changed: Tensor) -> NoReturn:
        """Raise PluginBroken that says which slot was left out, or which page written.

        changed: [pages, slots, parts], of a view of the layer
        """
        written = self._written(layer)
        unwritten = ~changed[written.entries, written.slots]
        if not bool(unwritten.any()):
            wrong = int((changed & ~written.is_written).nonzero()[0, 0])
            self._blame_page(layer, int(written.watched.pages[wrong]))
        part, token = unwritten.T.nonzero()[0].tolist()
        name, _ = self._parts(layer)[view + part]
        raise PluginBroken(
            f"{self.who} left {name} of layer {layer} unwritten at slot "
            f"{int(written.slots[token])} of page {int(written.pages[token])}, where a token of "
            "the step belongs"
        )

    def check_all(self) -> None:
        """Raise PluginBroken when a layer's pages changed after its own operation stored them, or
        pages that no operation of the step may write.
        """
        for layer, sums in self.after.items():
            for now, before in zip(self._sum_pages(layer), sums, strict=True):
                if not now.equals(before):
                    self._blame_page(layer, self._written(layer).watched.find_page(now, before))
            for now, before in zip(self._sum_others(layer), self.others_before[layer], strict=True):
                if not now.equals(before):
                    others = self.others[self.batch.kv[layer].group]
                    self._blame_page(layer, others.find_page(now, before))

    def _blame_page(self, layer: int, page: int) -> NoReturn:
        """Raise PluginBroken for a write to a page."""
        raise PluginBroken(
            f"{self.who} wrote to page {page} of layer {layer} outside of the slots of the step's "
            "tokens"
        )


def _index(part: Tensor, pages: Tensor, slots: Tensor) -> Tensor:
    """Copy the slots of a part.   returns: [n, ...]"""
    if part.dtype.itemsize == 1:  # torch indexes 8-bit floats as bytes only
        return part.view(torch.uint8)[pages, slots].view(part.dtype)
    return part[pages, slots]
