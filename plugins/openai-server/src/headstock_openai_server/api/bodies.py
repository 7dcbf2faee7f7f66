"""What all bodies of requests have in common."""

from __future__ import annotations

import msgspec


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A body; a field that it does not declare is refused."""
