"""Gemma-2, Gemma-3 and Gemma-4 text models for headstock."""

from __future__ import annotations

from headstock_gemma.plugin import gemma2, gemma3

__all__ = ["gemma2", "gemma3"]
