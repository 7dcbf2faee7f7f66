"""The entry point of `ngram`."""

from __future__ import annotations

from headstock.spi import ProposerSpec, SpiRange


def spec() -> ProposerSpec:
    """The spec of `ngram`."""
    return ProposerSpec(
        name="ngram",
        spi=SpiRange(0, 3),
        summary="what followed the latest tokens earlier in the sequence",
        implementation="headstock_ngram_proposer.proposer:NgramProposer",
        options="headstock_ngram_proposer.options:NgramOptions",
    )
