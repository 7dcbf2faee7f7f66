"""A reference for paged inference: attention in plain torch over pages in random order, and a
driver around it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from attrs import evolve, field, frozen
from torch import Tensor

from headstock.execution.kv_pools import count_page_bytes, page_shape, view_layer
from headstock.ops.bound import BoundOps
from headstock.spi import (
    Batch,
    KVGroup,
    KVLayer,
    LayerConfig,
    LayoutKind,
    Model,
    ModelConfig,
    Ops,
    Params,
)
from headstock_conformance.attention.reference import row_attention


def gather_kv(pool: Tensor, pages: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """A row's keys and values, each [length, kv_heads, head_dim].

    pool: [pages, 2, page_size, kv_heads, head_dim]    pages: [n] int64, the row's
    """
    keys, values = pool[pages].transpose(0, 1).flatten(1, 2)[:, :length]
    return keys, values


def make_pool(group: KVGroup, num_pages: int, page_size: int) -> Tensor:
    """Pages of a group, all of them NaN."""
    if group.layout.kind is LayoutKind.STATE:
        size = count_page_bytes(group, page_size, torch.float32, torch.float32)
        return torch.full((num_pages, size // 4), float("nan")).view(torch.uint8)
    return torch.full((num_pages, *page_shape(group.layout, page_size)), float("nan"))


@frozen(eq=False)
class Seated:
    """One sequence: the number of computed tokens, and its pages in each KV group."""

    computed: int
    pages: tuple[Tensor, ...]


@frozen(kw_only=True, eq=False)
class Paged:
    """A model over a pool with pages allocated in random order. `live` is written by `step`."""

    model: Model
    config: ModelConfig
    params: Params
    ops: Ops
    page_size: int
    max_pages: int
    pools: tuple[Tensor, ...]
    kv: tuple[KVLayer, ...]
    order: Tensor
    live: dict[int, Seated] = field(factory=dict)

    @classmethod
    def new(
        cls,
        model: Model,
        config: ModelConfig,
        params: Params,
        ops: Ops,
        *,
        page_size: int = 4,
        sequences: int = 4,
        length: int = 64,
        seed: int = 0,
    ) -> Paged:
        """Room for some sequences of up to `length` tokens; free pages hold NaN to detect reads."""
        max_pages = -(-length // page_size)
        total = 1 + sequences * max_pages
        order = 1 + torch.randperm(total - 1, generator=torch.Generator().manual_seed(seed))
        groups = [(layer.group, config.kv_groups[layer.group]) for layer in config.layers]
        pools = tuple(make_pool(group, total, page_size) for _, group in groups)
        kv = tuple(
            view_layer(pool, number, group, page_size, torch.float32)
            for pool, (number, group) in zip(pools, groups, strict=True)
        )
        bound = BoundOps(type(ops).__name__, ops, config)
        bound.bind(params, config)
        return cls(
            model=model,
            config=config,
            params=params,
            ops=bound,
            page_size=page_size,
            max_pages=max_pages,
            pools=pools,
            kv=kv,
            order=order,
        )

    def sequence(self, number: int) -> Seated:
        """The sequence of that number; a new one gets its own pages, others in each group."""
        if number not in self.live:
            taken = self.order.view(-1, self.max_pages)[number]
            groups = len(self.config.kv_groups)
            self.live[number] = Seated(0, tuple(taken.roll(group) for group in range(groups)))
        return self.live[number]

    def step(
        self,
        work: Mapping[int, Sequence[int]],
        saved: Mapping[int, Mapping[int, int]] = MappingProxyType({}),
    ) -> Tensor:
        """Scores after each of the new tokens, sequence by sequence.   returns: [tokens, vocab]

        saved: by sequence and token of it, the other sequence that goes on behind that token. All
            of them write to the same places of the pages that are no states, as in `fork`
        """
        rows = [(self.sequence(number), list(tokens)) for number, tokens in work.items()]
        spans = [torch.arange(row.computed, row.computed + len(tokens)) for row, tokens in rows]
        slots = tuple(
            torch.cat(
                [
                    row.pages[group][at // self.page_size] * self.page_size + at % self.page_size
                    for (row, _), at in zip(rows, spans, strict=True)
                ]
            )
            for group in range(len(self.config.kv_groups))
        )
        lens = torch.tensor([len(tokens) for _, tokens in rows])
        batch = Batch(
            tokens=torch.tensor([token for _, tokens in rows for token in tokens]),
            positions=torch.cat(spans),
            token_rows=torch.repeat_interleave(torch.tensor(list(work)), lens),
            row_ids=torch.tensor(list(work)),
            starts=torch.tensor([row.computed for row, _ in rows]),
            query_start=F.pad(lens.cumsum(0), (1, 0)).int(),
            max_query_len=int(lens.max()),
            slots=slots,
            pools=self.pools,
            kv=self.kv,
            state_pages=tuple(
                torch.stack([row.pages[number][0] for row, _ in rows])
                if group.layout.kind is LayoutKind.STATE
                else None
                for number, group in enumerate(self.config.kv_groups)
            ),
            logit_indices=None,
        )
        if saved:
            batch = evolve(batch, **self.find_saved(batch, list(work), saved))

        def attend(q: Tensor, index: int) -> Tensor:
            layer = self.config.layers[index]
            parts = torch.split(q, [len(tokens) for _, tokens in rows])
            return torch.cat(
                [
                    self.attend_row(part, row, layer)
                    for part, (row, _) in zip(parts, rows, strict=True)
                ]
            )

        with torch.inference_mode():
            hidden = self.model.forward(self.params, self.config, batch, attend, self.ops)
            score = self.model.logits
            scores = (
                self.ops.lm_head(hidden)
                if score is None
                else score(self.params, self.config, hidden, self.ops)
            )
        for number, (row, tokens) in zip(work, rows, strict=True):
            self.live[number] = Seated(row.computed + len(tokens), row.pages)
            for token, other in saved.get(number, {}).items():
                self.seat_behind(row, token, other)
        return scores

    def find_saved(
        self, batch: Batch, numbers: Sequence[int], saved: Mapping[int, Mapping[int, int]]
    ) -> dict[str, Any]:
        """The batch's fields for states behind tokens; `saved` as in `step`."""
        firsts = dict(zip(numbers, batch.query_start.tolist(), strict=False))
        pairs = [
            (firsts[number] + token, other)
            for number, others in saved.items()
            for token, other in others.items()
        ]
        return {
            "saved_tokens": torch.tensor([token for token, _ in pairs]),
            "saved_pages": tuple(
                torch.stack([self.sequence(other).pages[number][0] for _, other in pairs])
                if group.layout.kind is LayoutKind.STATE
                else None
                for number, group in enumerate(self.config.kv_groups)
            ),
        }

    def seat_behind(self, row: Seated, token: int, other: int) -> None:
        """Let another sequence be where the row is behind a token: its pages, but for states."""
        own = self.sequence(other)
        pages = tuple(
            mine if group.layout.kind is LayoutKind.STATE else its
            for group, its, mine in zip(self.config.kv_groups, row.pages, own.pages, strict=True)
        )
        self.live[other] = Seated(row.computed + token + 1, pages)

    def fork(self, number: int, other: int) -> None:
        """Let another sequence go on from where this one is: its pages, and a copy of its states.

        Both write to the same places of the other pages, so one goes on after the other.
        """
        row, own = self.sequence(number), self.sequence(other)
        pages = list(row.pages)
        for layer, kv in zip(self.config.layers, self.kv, strict=True):
            if kv.state:
                pages[layer.group] = own.pages[layer.group]
                source, target = (int(each.pages[layer.group][0]) for each in (row, own))
                self.pools[layer.index][target] = self.pools[layer.index][source]
        self.live[other] = Seated(row.computed, tuple(pages))

    def attend_row(self, q: Tensor, row: Seated, layer: LayerConfig) -> Tensor:
        """Attention of one row's new queries.   q, result: [queries, heads, head_dim]"""
        length = row.computed + len(q)
        pages = row.pages[layer.group][: -(-length // self.page_size)]
        if layer.latent is None:
            keys, values = gather_kv(self.pools[layer.index], pages, length)
        else:
            keys = self.pools[layer.index][pages].flatten(0, 1)[:length, None]
            values = keys[..., : layer.latent.kv_rank]
        sinks = None if layer.sinks is None else self.params[layer.sinks].tensor
        terms = (layer.scale, layer.window, layer.softcap, sinks)
        return row_attention(q, keys, values, *terms)[0].to(q.dtype)
