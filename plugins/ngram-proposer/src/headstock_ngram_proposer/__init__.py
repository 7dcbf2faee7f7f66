"""The proposer `ngram`: prompt lookup."""

from __future__ import annotations

from headstock_ngram_proposer.plugin import spec

__all__ = ["spec"]
