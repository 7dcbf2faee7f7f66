"""Several attention backends as one: each serves some KV groups of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import evolve, frozen
from torch import Tensor

from headstock.spi import AttentionBackend, AttentionStep, LayerInfo


@frozen(kw_only=True, eq=False)
class GroupPart:
    """A backend and what it serves.

    tables: the places of its KV groups in `AttentionStep.page_tables`
    layers: its own, by number, with their groups counted among `tables`
    """

    backend: AttentionBackend
    tables: tuple[int, ...]
    layers: Mapping[int, LayerInfo]


class GroupedAttention(AttentionBackend):
    """The backends of different KV groups behind one interface, whose plans are theirs in order."""

    def __init__(self, parts: Sequence[GroupPart]) -> None:
        self._parts = tuple(parts)
        self._places = {
            index: (number, part.backend, layer)
            for number, part in enumerate(parts)
            for index, layer in part.layers.items()
        }

    @property
    def backends(self) -> tuple[AttentionBackend, ...]:
        """The backends of the parts."""
        return tuple(part.backend for part in self._parts)

    def plan(self, step: AttentionStep) -> tuple[Any, ...]:
        """See `AttentionBackend.plan`."""
        return tuple(part.backend.plan(_select(step, part)) for part in self._parts)

    def forward(
        self, q: Tensor, layer: LayerInfo, plan: Any, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """See `AttentionBackend.forward`.   writes: out, lse"""
        number, backend, own = self._places[layer.index]
        backend.forward(q, own, plan[number], out, lse)

    def close(self) -> None:
        """See `AttentionBackend.close`."""
        for part in self._parts:
            part.backend.close()

    @property
    def min_shared_tokens(self) -> int | None:
        """The most that any of them needs; what is no number is left to the reader."""
        least = [part.backend.min_shared_tokens for part in self._parts]
        strange = [each for each in least if not isinstance(each, int)]
        return strange[0] if strange else max(each for each in least if each is not None)

    def graph_init(self, buckets: Sequence[int], max_seq_len: int) -> None:
        """See `AttentionBackend.graph_init`."""
        for part in self._parts:
            part.backend.graph_init(buckets, max_seq_len)

    def graph_plan(self, bucket: int, step: AttentionStep) -> tuple[Any, ...]:
        """See `AttentionBackend.graph_plan`."""
        return tuple(part.backend.graph_plan(bucket, _select(step, part)) for part in self._parts)

    def graph_update(self, plan: Any, step: AttentionStep) -> None:
        """See `AttentionBackend.graph_update`."""
        for part, own in zip(self._parts, plan, strict=True):
            part.backend.graph_update(own, _select(step, part))

    def capture_plan(self, step: AttentionStep) -> tuple[Any, ...]:
        """See `AttentionBackend.capture_plan`."""
        return tuple(part.backend.capture_plan(_select(step, part)) for part in self._parts)


def _select(step: AttentionStep, part: GroupPart) -> AttentionStep:
    """The step with the page tables of the part's KV groups alone."""
    shared = step.shared
    return evolve(
        step,
        page_tables=tuple(step.page_tables[place] for place in part.tables),
        shared=None
        if shared is None
        else evolve(
            shared, prefixes=_select(shared.prefixes, part), rest=_select(shared.rest, part)
        ),
    )
