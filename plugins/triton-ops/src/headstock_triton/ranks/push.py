"""Collectives of ranks whose devices reach each other's memory: small sums and joins by kernels."""

from __future__ import annotations

from types import MappingProxyType

import torch
import triton
from attrs import frozen
from torch import Tensor

from headstock.spi import Collectives, PeerMemory
from headstock_triton.norm import count_warps
from headstock_triton.pdl import has_pdl, launch_options
from headstock_triton.ranks.exchange import EMPTY, SETS
from headstock_triton.ranks.kernels import (
    add_norm_ranks_kernel,
    join_ranks_kernel,
    sum_ranks_kernel,
)

MOST_PDL_BYTES = 256 * 1024
"""Size of a sum up to which its kernel begins before the ones ahead of it end."""
BLOCK_BYTES = 4096
"""Size of what a program of a sum or a join exchanges."""
LEAST_ROW = 256
"""Bytes of the narrowest rows for which there is room in `most` bytes."""

_WORDS = MappingProxyType({2: torch.int16, 4: torch.int32, 8: torch.int64})


@frozen(kw_only=True, eq=False)
class Slots:
    """Places of the ranks' memory that one kind of kernel exchanges numbers through.

    own: [sets * count * size] uint8, this rank's
    addresses: [count + 1] int64, the last of the flag that says that a rank has gone
    epochs: [programs] int32, how often each program has exchanged, modulo the sets
    """

    own: Tensor
    addresses: Tensor
    epochs: Tensor


class PushCollectives(Collectives):
    """Sums and joins of up to `most` bytes by kernels, others by `inner`.

    A kernel writes its numbers to all ranks and adds what they write, so that a sum costs the time
    of one write. Sums are in the order of ranks, which have equal bits.
    """

    def __init__(self, inner: Collectives, memory: PeerMemory, most: int) -> None:
        self.inner = inner
        own, self.flag = memory.own, memory.abandoned
        self.index, self.count, self.most = inner.index, inner.count, most
        each = count_bytes(inner.count, most) // 3
        blocks = most // BLOCK_BYTES
        flag = torch.tensor([self.flag.data_ptr()], device=own.device)

        def take(at: int, programs: int) -> Slots:
            epochs = torch.zeros(programs, dtype=torch.int32, device=own.device)
            part = own[at * each : (at + 1) * each]
            addresses = torch.cat([memory.addresses + at * each, flag])
            return Slots(own=part, addresses=addresses, epochs=epochs)

        # Kernels share no places: a program of one exchanges other numbers than one of another.
        self.sums, self.joins = take(0, blocks), take(1, blocks)
        self.rows = take(2, most // LEAST_ROW)
        self.row_bytes = 0
        own.view(torch.int16).fill_(EMPTY)
        # No rank writes before all have emptied their memory.
        inner.all_reduce(torch.zeros(1, device=own.device))
        _wait(own.device)

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Collectives.all_reduce`."""
        if not (x.is_floating_point() and self._takes(x, x.itemsize)):
            return self.inner.all_reduce(x)
        x = x.contiguous()
        out = torch.empty_like(x)
        block = BLOCK_BYTES // x.itemsize
        grid = (triton.cdiv(x.numel(), block),)
        sum_ranks_kernel[grid](
            x,
            out,
            *self._reach(self.sums, x.itemsize),
            x.numel(),
            self.most // x.itemsize,
            RANK=self.index,
            WORLD=self.count,
            BLOCK=block,
            **launch_options(self._overlaps(x)),
        )
        return out

    def all_gather(self, x: Tensor) -> Tensor:
        """See `Collectives.all_gather`."""
        # Integers are exchanged in 64 bits.
        size = 8 if x.dtype == torch.int32 else x.itemsize if x.is_floating_point() else 0
        if not self._takes(x, size):
            return self.inner.all_gather(x)
        x = x.contiguous()
        out = x.new_empty((*x.shape[:-1], self.count * x.shape[-1]))
        block = BLOCK_BYTES // size
        grid = (triton.cdiv(x.numel(), block),)
        join_ranks_kernel[grid](
            x,
            out,
            *self._reach(self.joins, size),
            x.numel(),
            x.shape[-1],
            self.most // size,
            RANK=self.index,
            WORLD=self.count,
            BLOCK=block,
            **launch_options(self._overlaps(x)),
        )
        return out

    def can_add_norm(self, total: Tensor) -> bool:
        """Whether `add_norm` serves a stream of this shape."""
        # A row's places are its program's own only while all rows have one size.
        row_bytes = total.shape[1] * total.itemsize
        return (
            self._takes(total, total.itemsize)
            and len(total) <= len(self.rows.epochs)
            and self.row_bytes in (0, row_bytes)
        )

    def add_norm(self, total: Tensor, pending: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`total` and the sum of `pending` over ranks, normalized, times the weight.

        total, result: [tokens, hidden]    weight: [hidden]
        pending: [tokens, hidden], or [parts, tokens, hidden] float32, which are summed in order
        writes: total, the sum
        """
        out = torch.empty_like(total)
        tokens, width = total.shape
        self.row_bytes = width * total.itemsize
        block = triton.next_power_of_2(width)
        add_norm_ranks_kernel[(tokens,)](
            total,
            pending,
            weight,
            out,
            *self._reach(self.rows, total.itemsize),
            width,
            eps,
            total.numel(),
            self.most // total.itemsize,
            PARTS=len(pending) if pending.dim() == 3 else 1,
            RANK=self.index,
            WORLD=self.count,
            BLOCK=block,
            num_warps=count_warps(block),
            **launch_options(self._overlaps(total)),
        )
        return out

    def _takes(self, x: Tensor, size: int) -> bool:
        """Whether a kernel exchanges this tensor, with `size` bytes a number; 0: none does."""
        return size in _WORDS and 0 < x.numel() * size <= self.most

    def _overlaps(self, x: Tensor) -> bool:
        """Whether the kernel begins while the ones before it end."""
        return x.numel() * x.itemsize <= MOST_PDL_BYTES and has_pdl(x.device)

    def _reach(self, slots: Slots, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """The ranks' addresses, this rank's memory in integers of `size` bytes, epochs."""
        return slots.addresses, slots.own.view(_WORDS[size]), slots.epochs


def count_bytes(count: int, most: int) -> int:
    """Bytes that `PushCollectives` of so many ranks takes on each."""
    return 3 * SETS * count * most


def connect_by_push(inner: Collectives, most: int) -> Collectives:
    """Collectives that exchange up to `most` bytes by kernels, where devices reach each other.

    most: a multiple of `BLOCK_BYTES`
    """
    if inner.count == 1 or not most:
        return inner
    memory = inner.share_memory(count_bytes(inner.count, most))
    if memory is None:
        return inner
    return PushCollectives(inner, memory, most)


def _wait(device: torch.device) -> None:
    """Wait for what has been launched on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
