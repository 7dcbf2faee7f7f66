"""Logits processors: which scores they may change."""
