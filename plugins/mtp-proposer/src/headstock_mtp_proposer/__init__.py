"""The proposer `mtp`: layers of the checkpoint that predict further tokens."""

from __future__ import annotations

from headstock_mtp_proposer.plugin import spec

__all__ = ["spec"]
