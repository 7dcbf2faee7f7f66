"""The options of `fa`."""

from __future__ import annotations

from typing import Literal

from attrs import Attribute, field, frozen
from attrs.validators import ge, in_, instance_of, le

TritonRows = Literal["auto", "off"] | int

MOST_TRITON_ROWS = 1024


def _check_triton_rows(
    options: object, attribute: Attribute[TritonRows], value: TritonRows
) -> None:
    """Raise ValueError unless the value is auto, off or a number of rows."""
    if value in ("auto", "off") or (type(value) is int and 1 <= value <= MOST_TRITON_ROWS):
        return
    raise ValueError(f"triton_rows: expected auto, off or 1 to {MOST_TRITON_ROWS}, got {value!r}")


@frozen(kw_only=True)
class FlashOptions:
    """How attention is split.

    `num_splits`: in how many parts decode steps, and graphs of steps with prompts, read each row's
    keys at the same time. 0: in decode steps as many as fill the device, by the number of rows; in
    graphs of prompts by the contexts that they are for. It never depends on a step's lengths, so
    that a graph stays valid as they grow.

    `shared_prefix`: whether decode rows that share leading pages read these once per step, which
    needs a FlashAttention-3. auto: if that saves enough; on: if it saves anything. In steps with
    prompts this requires a graph of such steps.

    `triton_rows`: rows up to which decode steps use this plugin's Triton kernel instead of
    FlashAttention's. off: none; auto: 256 where that was measured: on GPUs from Hopper on, with
    16-bit keys and up to 8 query heads per KV head; with more than 2, from 64 programs (rows
    times KV heads) on.
    """

    num_splits: int = field(default=0, validator=[instance_of(int), ge(0), le(128)])
    shared_prefix: Literal["auto", "on", "off"] = field(
        default="auto", validator=in_(("auto", "on", "off"))
    )
    triton_rows: TritonRows = field(default="auto", validator=_check_triton_rows)
