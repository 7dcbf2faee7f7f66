"""Sums and joins over the ranks' devices: NCCL on GPUs, gloo on CPUs."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headstock.errors import CannotRun
from headstock.spi import Collectives, Ranks

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

    def __init__(self, group: Any, count: int) -> None:
        self.group = group
        self.count = count

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


def join_group(ranks: Ranks, address: str, device: torch.device) -> GroupCollectives:
    """Connect the devices of all ranks.

    address: of rank 0's machine, as all ranks reach it
    raises: CannotRun
    """
    index, count = ranks.index, ranks.count
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
    if device.type == "cpu":
        options = c10d.ProcessGroupGloo._Options()
        options._timeout = _TIMEOUT
        own = find_own_address(address)
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname=own)]
        group = c10d.ProcessGroupGloo(store, index, count, options)
    else:
        group = c10d.ProcessGroupNCCL(store, index, count, c10d.ProcessGroupNCCL.Options())
    collectives = GroupCollectives(group, count)
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
