"""Qwen2, Qwen2-MoE, Qwen3 and Qwen3-MoE models for headstock."""

from __future__ import annotations

from headstock_qwen.plugin import qwen2, qwen2_moe, qwen3, qwen3_moe

__all__ = ["qwen2", "qwen2_moe", "qwen3", "qwen3_moe"]
