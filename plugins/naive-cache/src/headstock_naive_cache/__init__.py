"""The cache policy `naive`: nothing is kept."""

from __future__ import annotations

from headstock_naive_cache.plugin import spec

__all__ = ["spec"]
