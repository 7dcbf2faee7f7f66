"""Decoders that transformers computes, over headstock's pages."""

from __future__ import annotations

from headstock_transformers.plugin import transformers

__all__ = ["transformers"]
