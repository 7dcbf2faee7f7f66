"""`OneDnnOps` for small models, whose maps would stay plain."""

from __future__ import annotations

from headstock.ops.onednn_ops import OneDnnOps


class PackedOps(OneDnnOps):
    """Every map is packed, however small."""

    def __init__(self) -> None:
        super().__init__(least_packed_bytes=0)
