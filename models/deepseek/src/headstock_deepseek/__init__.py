"""DeepSeek-V2 and DeepSeek-V3 models for headstock."""

from __future__ import annotations

from headstock_deepseek.plugin import deepseek_v2, deepseek_v3

__all__ = ["deepseek_v2", "deepseek_v3"]
