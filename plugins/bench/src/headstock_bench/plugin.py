"""What `bench` says of itself."""

from __future__ import annotations

from headstock.spi import CommandSpec, SpiRange


def spec() -> CommandSpec:
    """The spec of `bench`."""
    return CommandSpec(
        name="bench",
        spi=SpiRange(0, 2),
        summary="measure speed, with everything that a figure depends on beside it",
        implementation="headstock_bench.command:main",
        parser="headstock_bench.command:make_parser",
    )
