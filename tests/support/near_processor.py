"""A logits processor for measurements: it keeps the scores near the best one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import frozen
from torch import Tensor

from headstock.spi import LogitColumn, LogitsProcessor, LogitsSpec, SpiRange

ENTRY_POINTS = "[headstock.logits]\nnear = near_processor:spec\n"


@frozen(kw_only=True)
class NearArgs:
    """`extra_args={"reach": 2.0}`: how many standard deviations below the best to keep."""

    reach: float


def spec() -> LogitsSpec:
    """The processor `near`."""
    return LogitsSpec(
        name="near",
        spi=SpiRange(0, 3),
        summary="scores near the best one",
        implementation="near_processor:Near",
        request_args="near_processor:NearArgs",
    )


def install(folder: Path) -> None:
    """Make `folder`, which is to be on `sys.path`, a distribution with this processor."""
    info = folder / "headstock_near-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    metadata = "Metadata-Version: 2.1\nName: headstock-near\nVersion: 0\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    (info / "entry_points.txt").write_text(ENTRY_POINTS, encoding="utf-8")


class Near(LogitsProcessor):
    """Drops other scores, by six operations of torch."""

    @property
    def columns(self) -> Mapping[str, LogitColumn]:
        """How far to reach."""
        return {"reach": LogitColumn(neutral=1e9)}

    @property
    def changes_argmax(self) -> bool:
        """The best token stays."""
        return False

    def row(self, args: Any, prompt: Any, vocab: int) -> Mapping[str, Any] | None:
        """What a request says."""
        return {"reach": args.reach} if isinstance(args, NearArgs) else None

    def apply(self, logits: Tensor, at: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        """Drop the others."""
        spread = logits.std(-1, keepdim=True)
        floor = logits.amax(-1, keepdim=True) - columns["reach"][:, None] * spread
        return logits.masked_fill_(logits < floor, -math.inf)
