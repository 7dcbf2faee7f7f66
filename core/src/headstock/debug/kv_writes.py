"""Where operations write keys and values, and where they must not."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from headstock.errors import PluginBroken
from headstock.spi import Batch, LayerConfig

PATTERN = 0x5A
"""The bytes of a slot that is to be written; no kernel gives a whole vector of them."""


class KVWrites:
    """The pages that a step writes, layer by layer, as they were before it.

    Slots of the dummy page, which padding shares, are left out.
    """

    def __init__(self, batch: Batch, who: str) -> None:
        """Keep the pages that the batch's slots lie in.

        who: the operations, as errors name them
        """
        self.batch = batch
        self.who = who
        self.pages: dict[int, Tensor] = {}
        self.before: dict[int, Tensor] = {}
        self.after: dict[int, Tensor] = {}
        for layer, part in enumerate(batch.kv):
            if part.k is None and part.latent is None:
                continue  # a state
            slots = self._slots(part.group, part.page_slots)
            self.pages[layer] = torch.unique(slots // part.page_slots)
            self.before[layer] = self._read_pages(layer)

    def _slots(self, group: int, page_slots: int) -> Tensor:
        """The batch's slots in pages of its own, [n] int64."""
        slots = self.batch.slots[group]
        return slots[slots >= page_slots]

    def _read_pages(self, layer: int) -> Tensor:
        """The bytes of the layer's pages, copied."""
        pool = self.batch.pools[layer]
        return pool.view(torch.uint8)[self.pages[layer]]

    def _parts(self, layer: int) -> list[tuple[str, Tensor]]:
        """What the layer keeps of a token, by name: views of its pool, [pages, slots, ...]."""
        kv = self.batch.kv[layer]
        named = (("keys", kv.k), ("values", kv.v), ("latent vectors", kv.latent))
        return [(name, part) for name, part in named if part is not None]

    def _places(self, layer: int) -> tuple[Tensor, Tensor]:
        """The pages and the slots in them that the batch writes."""
        kv = self.batch.kv[layer]
        slots = self._slots(kv.group, kv.page_slots)
        return slots // kv.page_slots, slots % kv.page_slots

    def read(self, layer: LayerConfig) -> list[Tensor]:
        """Copy what the slots hold, one tensor a part, [n, ...]."""
        places = self._places(layer.index)
        return [_index(part, *places) for _, part in self._parts(layer.index)]

    def pair(
        self, layer: LayerConfig, wanted: list[Tensor]
    ) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Pair what the slots hold with what they should, by the name of the part.

        returns: [n, numbers] of the pool's type, which says how far they may differ
        """
        places = self._places(layer.index)
        for (name, part), reference in zip(self._parts(layer.index), wanted, strict=True):
            found = _index(part, *places)
            yield name, found.flatten(1), reference.flatten(1)

    def mark(self, layer: LayerConfig) -> None:
        """Fill the layer's slots with the pattern.   writes: the pool"""
        pages, slots = self._places(layer.index)
        for _, part in self._parts(layer.index):
            part.view(torch.uint8)[pages, slots] = PATTERN

    def check(self, layer: LayerConfig) -> None:
        """Raise PluginBroken unless the layer's slots were written, and nothing else."""
        number = layer.index
        pages, slots = self._places(number)
        for name, part in self._parts(number):
            left = (part.view(torch.uint8)[pages, slots] == PATTERN).flatten(1).all(1)
            if bool(left.any()):
                at = int(left.nonzero()[0])
                raise PluginBroken(
                    f"{self.who} left {name} of layer {number} unwritten at slot {int(slots[at])} "
                    f"of page {int(pages[at])}, where a token of the step belongs"
                )
        now = self._read_pages(number)
        self.after[number] = now.clone()
        # What the slots held before does not count: they are made alike in both copies.
        for copy in (now, self.before[number]):
            self._blank(number, copy)
        self._compare(number, now, self.before[number])

    def _blank(self, layer: int, copy: Tensor) -> None:
        """Write zeros to the slots in a copy of the layer's pages.   writes: copy"""
        pages, slots = self._places(layer)
        where = torch.searchsorted(self.pages[layer], pages)
        kv = self.batch.kv[layer]
        if kv.latent is not None:
            copy[where, slots] = 0
            return
        pool = self.batch.pools[layer]
        if pool.dim() == 5:
            copy[where, :, slots] = 0
            return
        # Keys and values of two widths: all keys of a page, then all values.
        start = 0
        flat = copy.view(len(copy), -1)
        for _, part in self._parts(layer):
            size = part[0, 0].numel() * part.dtype.itemsize
            length = part.shape[1] * size
            flat[:, start : start + length].view(len(copy), part.shape[1], size)[where, slots] = 0
            start += length

    def check_all(self) -> None:
        """Raise PluginBroken when a layer's pages changed after its own operation stored them."""
        for layer, kept in self.after.items():
            self._compare(layer, self._read_pages(layer), kept)

    def _compare(self, layer: int, now: Tensor, before: Tensor) -> None:
        """Raise PluginBroken when copies of the layer's pages differ."""
        if torch.equal(now, before):
            return
        differs = (now != before).flatten(1).any(1)
        page = int(self.pages[layer][int(differs.nonzero()[0])])
        raise PluginBroken(
            f"{self.who} wrote to page {page} of layer {layer} outside of the slots of the step's "
            "tokens"
        )


def _index(part: Tensor, pages: Tensor, slots: Tensor) -> Tensor:
    """Copy the slots of a part.   returns: [n, ...]"""
    if part.dtype.itemsize == 1:  # torch indexes 8-bit floats as bytes only
        return part.view(torch.uint8)[pages, slots].view(part.dtype)
    return part[pages, slots]
