"""What a request may say."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import gt, instance_of


@frozen(kw_only=True)
class TopNSigmaArgs:
    """`extra_args={"top_n_sigma": 1.0}`: how many standard deviations below the best to keep."""

    top_n_sigma: float = field(converter=float, validator=[instance_of(float), gt(0)])
