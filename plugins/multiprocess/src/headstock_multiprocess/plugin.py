"""The entry point of `multiprocess`."""

from __future__ import annotations

from headstock.spi import ExecutorSpec, SpiRange


def spec() -> ExecutorSpec:
    """The spec of `multiprocess`."""
    return ExecutorSpec(
        name="multiprocess",
        spi=SpiRange(0, 3),
        summary="one process a rank, which runs the plans of rank 0",
        implementation="headstock_multiprocess.start:start_ranks",
        options="headstock_multiprocess.options:MultiprocessOptions",
    )
