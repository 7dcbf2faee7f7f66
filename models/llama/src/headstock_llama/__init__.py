"""Llama and Mistral models for headstock."""

from __future__ import annotations

from headstock_llama.plugin import llama, ministral, mistral

__all__ = ["llama", "ministral", "mistral"]
