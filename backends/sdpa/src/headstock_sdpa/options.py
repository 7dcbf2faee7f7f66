"""The options of `sdpa`."""

from __future__ import annotations

from typing import Literal

from attrs import field, frozen
from attrs.validators import in_


@frozen(kw_only=True)
class SdpaOptions:
    """How decode reads pages.

    `shared_prefix`: whether decode rows that share leading pages read these once per step; on:
    whenever that saves anything, in steps without prompt tokens.
    """

    shared_prefix: Literal["on", "off"] = field(default="off", validator=in_(("on", "off")))
