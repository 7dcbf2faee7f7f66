"""Exchanges of ranks through each other's memory: what to compute, and what is right."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from attrs import frozen
from torch import Tensor

from headstock_triton.ranks.push import PushCollectives

EPS = 1e-6
HIDDEN = 144
"""Not a power of two: programs have places that no row of theirs has."""


@frozen
class Exchange:
    """One collective call, with the numbers that each rank brings.

    kind: "sum", "join" or "norm"
    terms: of each rank; of a norm [tokens, HIDDEN] or [parts, tokens, HIDDEN]
    """

    kind: str
    terms: tuple[Tensor, ...]
    total: Tensor
    gain: Tensor

    def run(self, ranks: PushCollectives) -> tuple[Tensor, ...]:
        """What a rank computes."""
        term = self.terms[ranks.index].clone()
        if self.kind == "norm":
            total = self.total.clone()
            return ranks.add_norm(total, term, self.gain, EPS), total
        return (ranks.all_reduce(term) if self.kind == "sum" else ranks.all_gather(term),)

    def expect(self) -> tuple[Tensor, ...]:
        """What is right, bit for bit but for the norm."""
        terms = [term.where(term != 0, 0) for term in self.terms]  # -0.0 becomes 0.0
        if self.kind == "join":
            return (torch.cat(terms, -1),)
        dtype = self.total.dtype
        if self.kind == "norm" and terms[0].dim() == 3:
            terms = [add_in_order(term.unbind()).to(dtype) for term in terms]
            terms = [term.where(term != 0, 0) for term in terms]
        found = add_in_order(terms).to(dtype)
        if self.kind == "sum":
            return (found,)
        total = (self.total.float() + found.float()).to(dtype)
        wide = total.float()
        scale = (wide.square().mean(-1, keepdim=True) + EPS).rsqrt()
        return (wide * scale * self.gain.float()).to(dtype), total


def add_in_order(terms: object) -> Tensor:
    """The sum in float32, term after term."""
    first, *others = terms  # type: ignore[misc]
    found: Tensor = first.float()
    for term in others:
        found = found + term.float()
    return found


def draw_exchanges(world: int, count: int, device: str, seed: int) -> Iterator[Exchange]:
    """Exchanges of all kinds and sizes, mixed; the same for the same seed."""
    chance = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int, dtype: torch.dtype) -> Tensor:
        x = torch.randn(*shape, generator=generator)
        # What marks an empty place, and what no sum may lose.
        x.view(-1)[::7] = -0.0
        x.view(-1)[3::50] = torch.nan if chance.random() < 0.2 else 1.0
        return x.to(dtype).to(device)

    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    of_rows = dtypes[seed % 3]  # the same for all norms, as in a model
    for _ in range(count):
        kind = chance.choice(("sum", "join", "norm"))
        dtype = of_rows if kind == "norm" else chance.choice(dtypes)
        rows = chance.choice((1, 2, 3, 5, 9))
        width = HIDDEN if kind == "norm" else chance.choice((1, 7, 250, 1200))
        parts = (3,) if kind == "norm" and chance.random() < 0.5 else ()
        of_terms = torch.float32 if parts else dtype
        terms = tuple(noise(*parts, rows, width, dtype=of_terms) for _ in range(world))
        if kind == "join" and chance.random() < 0.5:
            terms = tuple(any_integers(term) for term in terms)
        total, gain = noise(rows, width, dtype=dtype), noise(width, dtype=dtype)
        yield Exchange(kind, terms, total, gain)


def any_integers(x: Tensor) -> Tensor:
    """Integers of any bits, such as masks have, among them what empty places hold."""
    found = (x.float().nan_to_num() * 2**30).int()
    found.view(-1)[::5] = -(1 << 31)
    found.view(-1)[1::5] = -(1 << 31) + (1 << 15)
    found.view(-1)[2::5] = -1
    return found


def check(exchange: Exchange, found: tuple[tuple[Tensor, ...], ...]) -> None:
    """Check what all ranks have computed.   raises: AssertionError"""
    expected = exchange.expect()
    for rank, results in enumerate(found):
        for at, (result, right) in enumerate(zip(results, expected, strict=True)):
            where = f"{exchange.kind} of rank {rank}, {tuple(right.shape)} {right.dtype}"
            # All ranks have the same bits.
            assert same_bits(result, found[0][at]), where
            if exchange.kind == "norm" and at == 0:
                torch.testing.assert_close(result, right, equal_nan=True, atol=2e-2, rtol=2e-2)
            else:
                assert torch.equal(result.isnan(), right.isnan()), where
                assert torch.equal(result.nan_to_num(), right.nan_to_num()), where


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of floats have equal bits."""
    words = torch.int16 if one.itemsize == 2 else torch.int32
    return torch.equal(one.view(words), other.view(words))
