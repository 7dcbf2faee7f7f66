"""The cache policy `radix`: common prefixes are shared page by page."""
