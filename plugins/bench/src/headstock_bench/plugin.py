"""The specs of `bench` and `tune`."""

from __future__ import annotations

from headstock.spi import CommandSpec, SpiRange


def spec() -> CommandSpec:
    """The spec of `bench`."""
    return CommandSpec(
        name="bench",
        spi=SpiRange(0, 3),
        summary="measure speed and record the conditions of each figure",
        implementation="headstock_bench.command:main",
        parser="headstock_bench.command:make_parser",
    )


def tune_spec() -> CommandSpec:
    """The spec of `tune`."""
    return CommandSpec(
        name="tune",
        spi=SpiRange(0, 3),
        summary="measure the choices that auto could make here, and save the fastest",
        implementation="headstock_bench.tune_command:main",
        parser="headstock_bench.tune_command:make_parser",
    )
