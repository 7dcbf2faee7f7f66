"""Memory of the ranks' GPUs that all of them reach: CUDA's shared allocations."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from headstock.spi import PeerMemory

Gather = Callable[[bytes], Sequence[bytes]]
"""Gives the bytes of all ranks, in their order. All ranks call it, with equal numbers of bytes."""

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_HANDLE_BYTES = 64


class Unreachable(Exception):
    """A rank cannot share memory; the text says why."""


def share_device_memory(
    index: int, size: int, device: torch.device, gather: Gather
) -> PeerMemory | str:
    """Memory of `size` bytes of each rank, or why there is none, on all ranks.

    index: of this rank
    """
    with torch.cuda.device(device):
        memory, fault = None, ""
        try:
            memory = _Memory(size)
        except Unreachable as error:
            fault = str(error)
        handle = bytes(_HANDLE_BYTES) if memory is None else memory.handle
        host = hashlib.blake2b(_BOOT.read_bytes(), digest_size=8).digest()
        parts = gather(bytes([memory is not None]) + host + handle)
        if any(part[1 : 1 + len(host)] != host for part in parts):
            fault = fault or "the ranks are on several machines"
        if not all(part[0] for part in parts):
            fault = fault or "another rank has no memory to share"
        if memory is not None and not fault:
            try:
                memory.open_others(index, [part[-_HANDLE_BYTES:] for part in parts])
            except Unreachable as error:
                fault = str(error)
        # All ranks do without, if one cannot reach another.
        if not all(part[0] for part in gather(bytes([not fault]))):
            fault = fault or "another rank does not reach this one's memory"
        if memory is None or fault:
            return fault
        return PeerMemory(
            own=torch.as_tensor(memory, device=device),
            addresses=torch.tensor(memory.addresses, device=device),
            abandoned=torch.zeros(1, dtype=torch.int32, device=device),
        )


class _Memory:
    """An allocation that other processes can open, and how this one reaches theirs."""

    def __init__(self, size: int) -> None:
        """raises: Unreachable"""
        try:
            # A dependency of torch, where torch is built for CUDA.
            from cuda.bindings import runtime
        except ImportError as error:
            raise Unreachable("the package cuda-bindings is not installed") from error
        self._cuda: Any = runtime
        # Torch's own memory cannot be shared where its segments grow.
        address = int(self._call("cudaMalloc", size))
        self._finally("cudaFree", address)
        self.addresses = [address]
        self.handle = bytes(self._call("cudaIpcGetMemHandle", address).reserved)
        # Tensors made of this object keep it, and with it the memory.
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }

    def open_others(self, index: int, handles: Sequence[bytes]) -> None:
        """Reach the memory of the other ranks.   raises: Unreachable"""
        (own,) = self.addresses
        self.addresses = []
        for rank, content in enumerate(handles):
            address = own
            if rank != index:
                handle = self._cuda.cudaIpcMemHandle_t()
                handle.reserved = content
                flags = self._cuda.cudaIpcMemLazyEnablePeerAccess
                address = int(self._call("cudaIpcOpenMemHandle", handle, flags))
                self._finally("cudaIpcCloseMemHandle", address)
            self.addresses.append(address)

    def _finally(self, name: str, address: int) -> None:
        """Call a function of CUDA with the address when this object has gone."""
        # Not at exit: it would wait for a kernel that waits for a rank that has ended.
        weakref.finalize(self, getattr(self._cuda, name), address).atexit = False

    def _call(self, name: str, *arguments: Any) -> Any:
        """The result of a function of CUDA.   raises: Unreachable"""
        status, *results = getattr(self._cuda, name)(*arguments)
        if int(status) != 0:
            # A later check of torch's would find this error again, and blame a kernel.
            self._cuda.cudaGetLastError()
            raise Unreachable(f"{name} fails: {status.name}")
        return results[0]
