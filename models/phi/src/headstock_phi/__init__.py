"""Phi-3 and Phi-4 models for headstock."""

from __future__ import annotations

from headstock_phi.plugin import phi3

__all__ = ["phi3"]
