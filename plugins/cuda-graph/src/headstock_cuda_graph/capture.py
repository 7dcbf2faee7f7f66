"""Capture work as CUDA graphs: a replay costs one launch, or one per piece."""

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

CAPTURING = threading.Lock()
"""The lock that a capture holds.

torch has one stream for captures, which all engines of a process share. Without the lock the work
of two engines would end up in one graph.
"""


@frozen(eq=False)
class CapturedGraph(Generic[T]):
    """Captured work: `replay` repeats it and overwrites `result` in place."""

    replay: Callable[[], object]
    result: T


@frozen(eq=False)
class PiecewiseGraph:
    """Work captured in pieces between its attention calls.

    `replay(attend)` replays the pieces, calls `attend` between them and overwrites `result`, which
    is valid until another piecewise graph is replayed.
    """

    replay: Callable[[AttendInto], object]
    result: Tensor


PiecewiseWork = Callable[[AttendInto], Tensor]
"""Work with attention calls: it takes the function to call and returns a tensor."""


class GraphCapturer(Protocol):
    """Captures work as graphs."""

    def capture_pieces(self, work: PiecewiseWork) -> PiecewiseGraph:
        """Graphs of `work` whose replays call attention separately."""

    def is_worthwhile(self, work: PiecewiseWork, hidden: float) -> bool:
        """Whether the device needs less than `hidden` times what launching `work` takes."""

    def __call__(self, work: Callable[[], T], *, warm: bool) -> CapturedGraph[T]:
        """A graph of `work`.

        Without `warm` the work runs once before: libraries compile and allocate at first use, which
        is forbidden in a capture.
        """


class CudaGraphCapturer:
    """Captures CUDA graphs that share one memory pool, since no two of them run at once."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        # torch's own stream for captures, not a new one: libraries keep a workspace for every
        # stream that they see, 64 MiB each.
        stream = torch.cuda.graph(torch.cuda.CUDAGraph()).capture_stream
        assert stream is not None, "torch makes it with the first capture"
        self.stream = stream

    def __call__(self, work: Callable[[], T], *, warm: bool) -> CapturedGraph[T]:
        """A graph of `work`.   raises: what `work` raises"""
        with CAPTURING:
            return self.capture_locked(work, warm=warm)

    def capture_locked(self, work: Callable[[], T], *, warm: bool) -> CapturedGraph[T]:
        """A graph of `work`; the caller holds `CAPTURING`."""
        # The caller's stream may still be writing the inputs of the work.
        here = torch.cuda.current_stream()
        self.stream.wait_stream(here)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            if not warm:
                work()
                self.stream.synchronize()
            try:
                # Without memory it fails halfway. The mode only forbids unsafe calls in this
                # thread: others may keep allocating.
                graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
                result = work()
                # Fails where the work has caught the error that spoilt the capture.
                graph.capture_end()
            except BaseException:
                self.abandon_capture(graph)
                raise
        here.wait_stream(self.stream)
        return CapturedGraph(graph.replay, result)

    def capture_pieces(self, work: PiecewiseWork) -> PiecewiseGraph:
        """Graphs of the work between its attention calls.   raises: what `work` raises"""
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
        """The graphs, the arguments of the attention between them, and the result of the work."""
        graphs: list[torch.cuda.CUDAGraph] = []
        calls: list[tuple[Tensor, int, Tensor]] = []

        def begin() -> None:
            graphs.append(torch.cuda.CUDAGraph())
            graphs[-1].capture_begin(pool=self.pool, capture_error_mode="thread_local")

        def interrupt(q: Tensor, index: int, out: Tensor) -> None:
            graphs[-1].capture_end()
            # Only the address: a reference would keep the memory from later captures.
            calls.append((_unowned_view(q), index, out))
            begin()

        try:
            begin()
            result = work(interrupt)
            graphs[-1].capture_end()
        except BaseException:
            self.abandon_capture(graphs[-1])
            raise
        return graphs, calls, _unowned_view(result)

    def is_worthwhile(self, work: PiecewiseWork, hidden: float) -> bool:
        """Whether the device needs less than `hidden` times what launching `work` takes.

        Attention is excluded from both times.
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
            last.synchronize()  # so `here` has nothing left to wait for
            return bool(first.elapsed_time(last) < 1e3 * launched * hidden)

    def abandon_capture(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture whose work failed.

        If the failure invalidated the capture, torch's own end stops halfway, and three parts of
        torch consider the capture open:

        - the allocator would return no cached memory;
        - the allocator of pinned memory would refuse another capture into the same pool;
        - the random number generator would not work until a capture ends normally.
        """
        try:
            graph.capture_end()
        # Only logged: the error of the work, which is re-raised, says the same.
        except RuntimeError as error:
            LOG.debug("a capture whose work failed could not be ended: %s", error)
            device = torch.cuda.current_device()
            # torch's own names, which may change; or it has already ended
            with suppress(AttributeError, RuntimeError):
                memory: Any = torch.cuda.memory
                memory._cuda_endAllocateToPool(device, self.pool)
                memory._cuda_releasePool(device, self.pool)
            self.pool = torch.cuda.graph_pool_handle()
            with suppress(RuntimeError):
                self.capture_nothing()

    def capture_nothing(self) -> None:
        """Begin and end a capture, so that torch sees one end normally.   raises: RuntimeError"""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
        try:
            # torch warns about empty graphs. It may be memory that is missing.
            with suppress(torch.OutOfMemoryError):
                torch.zeros(1, device="cuda")
        finally:
            graph.capture_end()


def skip_attention(q: Tensor, index: int, out: Tensor) -> None:
    """Attention that computes nothing and leaves `out` unchanged."""


class UnownedMemory:
    """Device memory by its address; does not keep the memory alive."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.__cuda_array_interface__ = {
            "shape": (storage.nbytes(),),
            "typestr": "|u1",
            "data": (storage.data_ptr(), False),
            "version": 3,
        }


def _unowned_view(tensor: Tensor) -> Tensor:
    """A view of the tensor's memory that does not keep it alive.

    Results of a graph live in the graph's pool. While a tensor refers to one, later captures cannot
    reuse its memory, although they run only after it was read. References to the queries of 2,048
    tokens in 28 layers would hold 470 MB.
    """
    memory: Tensor = torch.as_tensor(UnownedMemory(tensor.untyped_storage()), device=tensor.device)
    return memory.view(tensor.dtype).as_strided(
        tensor.shape, tensor.stride(), tensor.storage_offset()
    )
