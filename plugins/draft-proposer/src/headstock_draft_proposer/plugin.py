"""The entry point of `draft`."""

from __future__ import annotations

from headstock.spi import ProposerSpec, SpiRange


def spec() -> ProposerSpec:
    """The spec of `draft`."""
    return ProposerSpec(
        name="draft",
        spi=SpiRange(0, 3),
        summary="what a second, small model of the same vocabulary says next",
        implementation="headstock_draft_proposer.proposer:DraftProposer",
        options="headstock_draft_proposer.options:DraftOptions",
        takes_model=True,
    )
