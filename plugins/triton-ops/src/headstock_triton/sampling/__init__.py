"""From logits to tokens: noise, masks, truncation, and rows that logits processors change."""

from __future__ import annotations
