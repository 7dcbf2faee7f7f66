"""The specs of `bench` and `tune`."""

from __future__ import annotations

from headstock.spi import CommandSpec, SpiRange


def spec() -> CommandSpec:
    """The spec of `bench`."""
    return CommandSpec(
        name="bench",
        spi=SpiRange(0, 3),
        summary="measure speed, with everything that a figure depends on beside it",
        implementation="headstock_bench.command:main",
        parser="headstock_bench.command:make_parser",
    )


def tune_spec() -> CommandSpec:
    """The spec of `tune`."""
    return CommandSpec(
        name="tune",
        spi=SpiRange(0, 3),
        summary="measure what auto could take here, and keep the fastest",
        implementation="headstock_bench.tune_command:main",
        parser="headstock_bench.tune_command:make_parser",
    )
