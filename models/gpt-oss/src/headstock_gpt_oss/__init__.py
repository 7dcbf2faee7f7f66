"""GPT-OSS models for headstock."""

from __future__ import annotations

from headstock_gpt_oss.plugin import gpt_oss

__all__ = ["gpt_oss"]
