"""Sums and joins over the ranks' devices: NCCL on GPUs, gloo on CPUs."""

from __future__ import annotations

import logging
import os
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headstock.errors import CannotRun
from headstock.logs import log_event
from headstock.spi import Collectives, PeerMemory, Ranks
from headstock_multiprocess.device_memory import share_device_memory

LOG = logging.getLogger("headstock.multiprocess")

_WITHOUT_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
"""What keeps libraries from NVLink multicast, which may put a host's GPUs out of service."""

_TIMEOUT = timedelta(days=1)
"""Of a collective. Ranks are watched by their messages: one that compiles is not lost."""


class GroupCollectives(Collectives):
    """The collectives of a process group, which is this object's own."""

    # No default group: a program that uses headstock may have one for purposes of its own.

    def __init__(self, group: Any, index: int, count: int, device: torch.device) -> None:
        self.group = group
        self.index, self.count = index, count
        self.device = device
        self.flags: list[Tensor] = []
        self.side: torch.cuda.Stream | None = None
        self.one = torch.ones(1, dtype=torch.int32)

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Collectives.all_reduce`."""
        x = x.contiguous()
        self.group.allreduce([x]).wait()
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """See `Collectives.all_gather`."""
        x = x.contiguous()
        parts = x.new_empty((self.count, *x.shape))
        self.group.allgather([list(parts.unbind(0))], [x]).wait()
        return parts.movedim(0, -2).flatten(-2)

    def share_memory(self, size: int) -> PeerMemory | None:
        """See `Collectives.share_memory`."""
        if self.device.type != "cuda":
            return None
        memory = share_device_memory(self.index, size, self.device, self._gather_bytes)
        if isinstance(memory, PeerMemory):
            self.flags.append(memory.abandoned)
            # Now: while a kernel waits, the device makes no stream and pins no memory.
            self.side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            self.one = self.one.pin_memory()
            return memory
        if self.index == 0:
            LOG.warning(log_event("kernels do not exchange numbers between ranks", because=memory))
        return None

    def abandon(self) -> None:
        """End what waits on the device for a rank that has gone, with numbers that nobody uses.

        For another thread than the one that computes, and before `abort`, which may hold the
        driver's locks until all kernels have ended.
        """
        if self.side is None:
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self.side):
            for flag in self.flags:
                flag.copy_(self.one, non_blocking=True)  # a copy, which needs no room for a kernel
        self.side.synchronize()

    def abort(self) -> None:
        """Have the group's own sums end; for another thread than the one that computes."""
        if self.device.type == "cuda":
            self.group.abort()

    def _gather_bytes(self, content: bytes) -> list[bytes]:
        """The bytes of all ranks."""
        x = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(self.device)
        return [bytes(row) for row in self.all_gather(x[None]).view(self.count, -1).tolist()]


class HostCollectives(GroupCollectives):
    """Those of ranks whose GPU NCCL cannot serve, because they have the same: by way of the host.

    A sum waits for the device, and no graph can have one.
    """

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Collectives.all_reduce`."""
        return super().all_reduce(x.cpu()).to(x.device)

    def all_gather(self, x: Tensor) -> Tensor:
        """See `Collectives.all_gather`."""
        return super().all_gather(x.cpu()).to(x.device)

    def abort(self) -> None:
        """See `GroupCollectives.abort`; gloo notices by itself."""


def join_group(
    ranks: Ranks, address: str, device: torch.device, *, one_gpu: bool
) -> GroupCollectives:
    """Connect the devices of all ranks.

    address: of rank 0's machine, as all ranks reach it
    one_gpu: the ranks have the same GPU
    raises: CannotRun
    """
    index, count = ranks.index, ranks.count
    if device.type == "cuda":
        torch.cuda.set_device(device)  # of this thread
    if not dist.is_available():
        raise CannotRun(
            f"tp (--tp) {count}: torch {torch.__version__} is built without torch.distributed; "
            "install a build that has it"
        )
    for name, value in _WITHOUT_MULTICAST.items():
        os.environ.setdefault(name, value)
    # Public names of torch, which its types leave out.
    c10d: Any = dist
    if index == 0:
        store = c10d.TCPStore(
            address, 0, count, is_master=True, wait_for_workers=False, timeout=_TIMEOUT
        )
        ranks.share(store.port)
    else:
        store = c10d.TCPStore(address, ranks.share(None), count, is_master=False, timeout=_TIMEOUT)
    kind = GroupCollectives
    if device.type == "cpu" or one_gpu:
        options = c10d.ProcessGroupGloo._Options()
        options._timeout = _TIMEOUT
        own = find_own_address(address)
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname=own)]
        group = c10d.ProcessGroupGloo(store, index, count, options)
        kind = HostCollectives if one_gpu else GroupCollectives
    else:
        group = c10d.ProcessGroupNCCL(store, index, count, c10d.ProcessGroupNCCL.Options())
    collectives = kind(group, index, count, device)
    # NCCL connects at the first sum, which must not be in the capture of a graph.
    total = int(collectives.all_reduce(torch.ones(1, device=device)).item())
    if total != count:
        raise CannotRun(f"a sum over {count} ranks is {total}; check that each has its own GPU")
    return collectives


def find_own_address(other: str) -> str:
    """The address of this machine from which it reaches another one."""
    family = socket.AF_INET6 if ":" in other else socket.AF_INET
    # Nothing is sent: the system only looks up its routes.
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))
        address: str = probe.getsockname()[0]
    return address
