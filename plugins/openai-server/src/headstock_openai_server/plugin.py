"""The entry point of `serve`."""

from __future__ import annotations

from headstock.spi import CommandSpec, SpiRange


def spec() -> CommandSpec:
    """The spec of the verb `serve`."""
    return CommandSpec(
        name="serve",
        spi=SpiRange(0, 3),
        summary="serve a model over HTTP, as OpenAI's API does",
        implementation="headstock_openai_server.command:main",
        parser="headstock_openai_server.command:make_parser",
    )
