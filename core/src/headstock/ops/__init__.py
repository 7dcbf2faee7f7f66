"""The operations of a forward pass: plain torch, oneDNN, fbgemm, and compositions of them."""

from __future__ import annotations

__all__ = ["bound", "fbgemm_ops", "fine_tier", "onednn_ops", "torch_ops"]
