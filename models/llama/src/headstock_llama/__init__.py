"""Llama, Mistral and their variants for headstock."""

from __future__ import annotations

from headstock_llama.plugin import (
    ernie,
    ernie_moe,
    granite,
    llama,
    ministral,
    mistral,
    mixtral,
    seed_oss,
    smollm3,
)

__all__ = [
    "ernie",
    "ernie_moe",
    "granite",
    "llama",
    "ministral",
    "mistral",
    "mixtral",
    "seed_oss",
    "smollm3",
]
