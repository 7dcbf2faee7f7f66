"""The entry point of `demo`."""

from __future__ import annotations

from pathlib import Path

from headstock.spi import CheckpointSpec, SpiRange


def spec() -> CheckpointSpec:
    """The spec of `demo`: the checkpoint folder beside this file."""
    return CheckpointSpec(
        name="demo",
        spi=SpiRange(0, 3),
        summary="a small Qwen3-shaped model of short stories, sums, recall and chats",
        directory=str(Path(__file__).parent / "checkpoint"),
    )
