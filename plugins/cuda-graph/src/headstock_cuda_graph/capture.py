"""Capturing work so that it can be done again at the cost of one launch, or of one for each of its
pieces.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

import torch
from attrs import frozen
from torch import Tensor

from headstock.spi import AttendInto

LOG = logging.getLogger("headstock.cudagraph")

T = TypeVar("T")

MOST_HIDDEN = 1.5
"""How many times longer than its launches work may take on the device and still be captured. The
launches of a step that takes longer cost nothing, since the host runs ahead of the device.
"""

CAPTURING = threading.Lock()
"""Held while something is captured: torch has one stream for captures, which all engines of a
process share.
"""


@frozen(eq=False)
class CapturedGraph(Generic[T]):
    """Work that was captured: `replay` does it again, and leaves what it makes in `result`."""

    replay: Callable[[], object]
    result: T


@frozen(eq=False)
class PiecewiseGraph:
    """Work that was captured but for the calls of attention in it: `replay` does the rest again,
    calls the attention that it is given, and leaves what the work makes in `result`, until another
    piecewise graph is replayed.
    """

    replay: Callable[[AttendInto], object]
    result: Tensor


PiecewiseWork = Callable[[AttendInto], Tensor]
"""Work that calls the attention it is given."""


class GraphCapturer(Protocol):
    """Captures work as graphs."""

    def capture_pieces(self, work: PiecewiseWork) -> PiecewiseGraph:
        """Graphs of `work` that calls attention anew each time."""

    def is_worthwhile(self, work: PiecewiseWork) -> bool:
        """Whether launching `work` takes the host longer than doing it takes the device."""

    def __call__(self, work: Callable[[], T], *, warm: bool) -> CapturedGraph[T]:
        """A graph of `work`; when not `warm` it is done once beforehand, for what libraries do
        at first use.
        """


class CudaGraphCapturer:
    """Captures CUDA graphs, which share one pool of memory: no two of them run at the same time."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        # torch's own stream for captures: libraries keep workspaces for every stream they see, 64
        # MiB each.
        stream = torch.cuda.graph(torch.cuda.CUDAGraph()).capture_stream
        assert stream is not None, "torch makes it with the first capture"
        self.stream = stream

    def __call__(self, work: Callable[[], T], *, warm: bool) -> CapturedGraph[T]:
        """A graph of `work`.   raises: what `work` raises"""
        with CAPTURING:
            return self.capture_locked(work, warm=warm)

    def capture_locked(self, work: Callable[[], T], *, warm: bool) -> CapturedGraph[T]:
        """A graph of `work`, nothing else being captured."""
        here = torch.cuda.current_stream()
        self.stream.wait_stream(here)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            if not warm:
                work()
                self.stream.synchronize()
            # Other threads may go on allocating: only this one's work is captured.
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                result = work()
            except BaseException:
                self.abandon_capture(graph)
                raise
            graph.capture_end()
        here.wait_stream(self.stream)
        return CapturedGraph(graph.replay, result)

    def capture_pieces(self, work: PiecewiseWork) -> PiecewiseGraph:
        """A list of graphs with calls of attention between them.   raises: what `work` raises"""
        with CAPTURING:
            here = torch.cuda.current_stream()
            self.stream.wait_stream(here)
            with torch.cuda.stream(self.stream):
                graphs, calls, result = self.capture_pieces_locked(work)
            here.wait_stream(self.stream)

        def replay(attend: AttendInto) -> None:
            graphs[0].replay()
            for graph, call in zip(graphs[1:], calls, strict=True):
                attend(*call)
                graph.replay()

        return PiecewiseGraph(replay, result)

    def capture_pieces_locked(
        self, work: PiecewiseWork
    ) -> tuple[list[torch.cuda.CUDAGraph], list[tuple[Tensor, int, Tensor]], Tensor]:
        """The graphs, the arguments of the attention between them, and what the work gave."""
        graphs: list[torch.cuda.CUDAGraph] = []
        calls: list[tuple[Tensor, int, Tensor]] = []

        def begin() -> None:
            graphs.append(torch.cuda.CUDAGraph())
            graphs[-1].capture_begin(pool=self.pool, capture_error_mode="thread_local")

        def interrupt(q: Tensor, index: int, out: Tensor) -> None:
            graphs[-1].capture_end()
            calls.append((_unowned_view(q), index, out))
            begin()

        begin()
        try:
            result = work(interrupt)
        except BaseException:
            self.abandon_capture(graphs[-1])
            raise
        graphs[-1].capture_end()
        return graphs, calls, _unowned_view(result)

    def is_worthwhile(self, work: PiecewiseWork) -> bool:
        """Whether launching `work` takes longer than doing it: where it does not, launches hide
        behind the device, and padding to a bucket only adds work. Attention is left out of both.
        """
        with CAPTURING, torch.cuda.stream(self.stream):
            work(skip_attention)  # compiles, and takes what libraries keep
            self.stream.synchronize()
            first: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            last: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            began = time.perf_counter()
            first.record()
            work(skip_attention)
            last.record()
            launched = time.perf_counter() - began
            last.synchronize()
            return bool(first.elapsed_time(last) < 1e3 * launched * MOST_HIDDEN)

    def abandon_capture(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture whose work failed. Where that spoilt it, torch's own end stops half way,
        and three things take it to be open: the allocator, which would give nothing back of what it
        keeps for later; the allocator of pinned memory, which would refuse to capture into the same
        pool again; and the generator of random numbers, which would draw none until another capture
        ends as it should.
        """
        try:
            graph.capture_end()
        except (
            RuntimeError
        ) as error:  # says what the work's own error, which is raised on, has said
            LOG.debug("a capture whose work failed could not be ended: %s", error)
            device = torch.cuda.current_device()
            # torch's own names, which may change; or it was ended already
            with suppress(AttributeError, RuntimeError):
                memory: Any = torch.cuda.memory
                memory._cuda_endAllocateToPool(device, self.pool)
                memory._cuda_releasePool(device, self.pool)
            self.pool = torch.cuda.graph_pool_handle()
            with suppress(RuntimeError):
                self.capture_nothing()

    def capture_nothing(self) -> None:
        """Begin and end a capture.   raises: RuntimeError"""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
        torch.zeros(1, device="cuda")  # torch warns of graphs that are empty
        graph.capture_end()


def skip_attention(q: Tensor, index: int, out: Tensor) -> None:
    """Compute no attention."""


class UnownedMemory:
    """Device memory by its address, kept alive by nobody."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.__cuda_array_interface__ = {
            "shape": (storage.nbytes(),),
            "typestr": "|u1",
            "data": (storage.data_ptr(), False),
            "version": 3,
        }


def _unowned_view(tensor: Tensor) -> Tensor:
    """The same memory as a tensor that does not keep it.

    What a graph makes lives in its pool as long as the graph does. A reference would keep later
    captures from using the memory too, though they only run when nobody reads it any more: 470 MB
    for the queries of 2,048 tokens in 28 layers.
    """
    memory: Tensor = torch.as_tensor(UnownedMemory(tensor.untyped_storage()), device=tensor.device)
    return memory.view(tensor.dtype).as_strided(
        tensor.shape, tensor.stride(), tensor.storage_offset()
    )
