"""The entry point of `mtp`."""

from __future__ import annotations

from headstock.spi import ProposerSpec, SpiRange


def spec() -> ProposerSpec:
    """The spec of `mtp`."""
    return ProposerSpec(
        name="mtp",
        spi=SpiRange(0, 3),
        summary="the checkpoint's own layers that predict further tokens",
        implementation="headstock_mtp_proposer.proposer:MtpProposer",
        options="headstock_mtp_proposer.options:MtpOptions",
        by_model=True,
    )
