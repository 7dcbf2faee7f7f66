"""The entry point of `cudagraph`."""

from __future__ import annotations

from headstock.spi import (
    DeviceRange,
    GraphSupport,
    LayoutKind,
    RunnerCapabilities,
    RunnerSpec,
    SpiRange,
)


def spec() -> RunnerSpec:
    """The spec of `cudagraph`: CUDA, and a decode backend that can be captured."""
    return RunnerSpec(
        name="cudagraph",
        spi=SpiRange(0, 3),
        summary="replays decode steps as CUDA graphs, and runs others operation by operation",
        implementation="headstock_cuda_graph.runner:CudaGraphRunner",
        options="headstock_cuda_graph.options:GraphOptions",
        capabilities=RunnerCapabilities(
            devices=(DeviceRange("cuda"),),
            needs_graph=GraphSupport.DECODE,
            layouts=frozenset(LayoutKind),
            pooling=True,
            drafts=True,
        ),
    )
