"""Bytes in and out: bodies, event streams, what every request passes, the page."""
