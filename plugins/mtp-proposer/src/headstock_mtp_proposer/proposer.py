"""How many drafts the model's own layers make."""

from __future__ import annotations

from headstock.spi import Proposer
from headstock_mtp_proposer.options import MtpOptions


class MtpProposer(Proposer):
    """Leaves the drafts to the model, which core asks in the step."""

    def __init__(self, options: MtpOptions) -> None:
        self.options = options

    @property
    def max_drafts(self) -> int:
        """Set the options."""
        return self.options.max_drafts
