"""The proposer `draft`: a second model."""

from __future__ import annotations

from headstock_draft_proposer.plugin import spec

__all__ = ["spec"]
