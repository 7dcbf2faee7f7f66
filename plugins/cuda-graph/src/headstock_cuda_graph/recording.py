"""Recording work so that it can be done again at the cost of one launch."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

import torch
from attrs import frozen

LOG = logging.getLogger("headstock.cudagraph")

T = TypeVar("T")

CAPTURING = threading.Lock()
"""Held while something is recorded: torch has one stream for captures, which all engines of a process share."""


@frozen(eq=False)
class Recording(Generic[T]):
    """Work that was recorded: `replay` does it again, and leaves what it makes in `result`."""

    replay: Callable[[], object]
    result: T


class Recorder(Protocol):
    """Whatever can record work."""

    def __call__(self, work: Callable[[], T], *, warm: bool) -> Recording[T]:
        """A recording of `work`; when not `warm` it is done once beforehand, for what libraries do at first use."""


class CudaRecorder:
    """Records CUDA graphs, which share one pool of memory: no two of them run at the same time."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        # torch's own stream for captures: libraries keep workspaces for every stream they see, 64 MiB each.
        self.stream = torch.cuda.graph(torch.cuda.CUDAGraph()).capture_stream

    def __call__(self, work: Callable[[], T], *, warm: bool) -> Recording[T]:
        """A graph of `work`.   raises: what `work` raises"""
        with CAPTURING:
            return self.record(work, warm=warm)

    def record(self, work: Callable[[], T], *, warm: bool) -> Recording[T]:
        """A graph of `work`, nothing else being recorded."""
        here = torch.cuda.current_stream()
        self.stream.wait_stream(here)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            if not warm:
                work()
                self.stream.synchronize()
            # Other threads may go on allocating: only this one's work is recorded.
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                result = work()
            except BaseException:
                self.give_up(graph)
                raise
            graph.capture_end()
        here.wait_stream(self.stream)
        return Recording(graph.replay, result)

    def give_up(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture whose work failed. Where that spoilt it, torch's own end stops half way, and three things take
        it to be open: the allocator, which would give nothing back of what it keeps for later; the allocator of pinned
        memory, which would refuse to record into the same pool again; and the generator of random numbers, which
        would draw none until another capture ends as it should.
        """
        try:
            graph.capture_end()
        except RuntimeError as error:  # says what the work's own error, which is raised on, has said
            LOG.debug("a capture whose work failed could not be ended: %s", error)
            device = torch.cuda.current_device()
            with suppress(AttributeError, RuntimeError):  # torch's own names, which may change; or it was ended already
                torch.cuda.memory._cuda_endAllocateToPool(device, self.pool)
                torch.cuda.memory._cuda_releasePool(device, self.pool)
            self.pool = torch.cuda.graph_pool_handle()
            with suppress(RuntimeError):
                self.record_nothing()

    def record_nothing(self) -> None:
        """Begin and end a capture.   raises: RuntimeError"""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
        torch.zeros(1, device="cuda")  # torch warns of graphs that are empty
        graph.capture_end()
