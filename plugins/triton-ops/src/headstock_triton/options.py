"""The options of `triton`."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import ge, instance_of, le

MOST_TOKENS = 16


@frozen(kw_only=True)
class TritonOptions:
    """`small_linear`: up to how many tokens products are made by kernels of this plugin; 0: by torch, always."""

    small_linear: int = field(default=0, validator=[instance_of(int), ge(0), le(MOST_TOKENS)])
