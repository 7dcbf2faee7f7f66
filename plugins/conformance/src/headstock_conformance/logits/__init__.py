"""Logits processors: what they may change."""
