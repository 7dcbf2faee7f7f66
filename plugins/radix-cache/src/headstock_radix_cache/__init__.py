"""The cache policy `radix`: common prefixes are shared page by page."""

from __future__ import annotations

from headstock_radix_cache.plugin import spec

__all__ = ["spec"]
