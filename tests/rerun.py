"""The CUDA-graph runner on a CPU: a "graph" does its work again and writes what it makes where it
wrote before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import attrs
from torch import Tensor
from torch.overrides import TorchFunctionMode

from headstock.spi import (
    DeviceRange,
    GraphSupport,
    LayoutKind,
    Program,
    RunnerCapabilities,
    RunnerSpec,
    SpiRange,
)
from headstock_cuda_graph.capture import (
    CapturedGraph,
    PiecewiseGraph,
    PiecewiseWork,
    skip_attention,
)
from headstock_cuda_graph.options import GraphOptions
from headstock_cuda_graph.runner import CudaGraphRunner

T = TypeVar("T")


def spec() -> RunnerSpec:
    """The runner `rerun`."""
    return RunnerSpec(
        name="rerun",
        spi=SpiRange(0, 3),
        summary="replays by computing again",
        implementation="rerun:RerunRunner",
        options="headstock_cuda_graph.options:GraphOptions",
        capabilities=RunnerCapabilities(
            devices=(DeviceRange("cpu"),),
            needs_graph=GraphSupport.DECODE,
            layouts=frozenset(LayoutKind),
            pooling=True,
            drafts=True,
        ),
    )


class RerunRunner(CudaGraphRunner):
    """The runner, with graphs that a CPU can make."""

    def __init__(self, program: Program, options: GraphOptions) -> None:
        super().__init__(program, options, RerunCapturer())


class RerunCapturer:
    """Recordings that compute again."""

    def __call__(self, work: Callable[[], T], *, warm: bool) -> CapturedGraph[T]:
        """See `capture`."""
        return capture(work, warm=warm)

    def capture_pieces(self, work: PiecewiseWork) -> PiecewiseGraph:
        """Work whose result stays at its addresses; the attention it is given is called as often as
        it has layers.
        """
        result = work(skip_attention)
        return PiecewiseGraph(lambda attend: write(result, work(attend)), result)

    def is_worthwhile(self, work: PiecewiseWork, hidden: float) -> bool:
        """Whatever it takes."""
        return True


def capture(work: Callable[[], T], *, warm: bool) -> CapturedGraph[T]:
    """Work whose result stays at its addresses, like that of a graph."""
    with _Captured():
        result = work()

    def replay() -> None:
        write(result, work())

    return CapturedGraph(replay, result)


class _Captured(TorchFunctionMode):
    """Refuses what a CUDA graph cannot capture and a CPU computes all the same."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.__setitem__ and not isinstance(args[2], Tensor):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            # On a GPU the number becomes a tensor of the host, which is copied.
            assert not any(isinstance(each, Tensor) for each in index), "copies a number"
        return func(*args, **(kwargs or {}))


def write(old: object, new: object) -> None:
    """Put the values of `new` into the tensors of `old`."""
    if isinstance(old, Tensor):
        assert isinstance(new, Tensor) and old.shape == new.shape and old.dtype == new.dtype
        old.copy_(new)
    elif attrs.has(type(old)):
        for name in attrs.fields_dict(type(old)):
            write(getattr(old, name), getattr(new, name))
