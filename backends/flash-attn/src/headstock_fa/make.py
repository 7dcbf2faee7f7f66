"""The backend for the layout of a model's groups."""

from __future__ import annotations

from headstock.spi import AttentionBackend, AttentionContext, LayoutKind
from headstock_fa.backend import FlashAttentionBackend
from headstock_fa.latent import LatentBackend


def make_backend(context: AttentionContext) -> AttentionBackend:
    """Make the backend; all groups have one layout, since no mixed ones are claimed.

    raises: ValueError as its constructor does
    """
    is_latent = context.query.groups[0].layout.kind is LayoutKind.LATENT
    return LatentBackend(context) if is_latent else FlashAttentionBackend(context)
