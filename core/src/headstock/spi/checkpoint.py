"""Checkpoints that come as a distribution of their own."""

from __future__ import annotations

from attrs import frozen

from headstock.spi.versions import SpiRange


@frozen(kw_only=True)
class CheckpointSpec:
    """A model directory in Hugging Face layout, found by name instead of by path."""

    name: str
    spi: SpiRange
    summary: str
    directory: str
