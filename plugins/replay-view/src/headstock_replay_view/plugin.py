"""The entry point of `replay-view`."""

from __future__ import annotations

from headstock.spi import CommandSpec, SpiRange


def spec() -> CommandSpec:
    """The spec of the verb `replay-view`."""
    return CommandSpec(
        name="replay-view",
        spi=SpiRange(0, 3),
        summary="draw a recorded schedule: a page for a browser, or a trace",
        implementation="headstock_replay_view.command:main",
        parser="headstock_replay_view.command:make_parser",
    )
