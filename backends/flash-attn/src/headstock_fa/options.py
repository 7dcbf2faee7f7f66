"""The options of `fa`."""

from __future__ import annotations

from typing import Literal

from attrs import field, frozen
from attrs.validators import ge, in_, instance_of, le


@frozen(kw_only=True)
class FlashOptions:
    """How decode is cut up.

    `num_splits`: in how many parts each row's keys are read at the same time. 0: as many as fill
    the device, by the number of rows. It never depends on lengths, so that a graph stays valid as
    they grow.

    `shared_prefix`: whether decode rows that share leading pages read these once a step, which
    needs a FlashAttention-3. auto: where that spares enough; on: wherever it spares anything.
    """

    num_splits: int = field(default=0, validator=[instance_of(int), ge(0), le(128)])
    shared_prefix: Literal["auto", "on", "off"] = field(
        default="auto", validator=in_(("auto", "on", "off"))
    )
