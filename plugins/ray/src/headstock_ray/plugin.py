"""The entry point of `ray`."""

from __future__ import annotations

from headstock.spi import ExecutorSpec, Require, SpiRange

VERSIONS = ">=2.60,<3"


def spec() -> ExecutorSpec:
    """The spec of `ray`."""
    return ExecutorSpec(
        name="ray",
        spi=SpiRange(0, 3),
        summary="one Ray actor a rank, on any nodes of a cluster",
        requires=(
            Require(
                import_name="ray",
                distribution="ray",
                version=VERSIONS,
                hint=f"pip install 'ray{VERSIONS}'",
            ),
        ),
        implementation="headstock_ray.start:start_ranks",
        options="headstock_ray.options:RayOptions",
    )
