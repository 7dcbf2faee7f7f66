"""The options of `multiprocess`."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import ge, gt, instance_of


@frozen(kw_only=True)
class MultiprocessOptions:
    """When a rank counts as lost, and where ranks compute.

    silence: seconds without a sign of life after which a rank is taken for stopped
    patience: seconds that a rank may take for a step that rank 0 has finished
    one_gpu: all ranks of this machine compute on its first GPU, slowly: to try there what a program
        does on several
    """

    silence: float = field(default=30.0, converter=float, validator=[instance_of(float), gt(0)])
    patience: float = field(default=300.0, converter=float, validator=[instance_of(float), ge(1)])
    one_gpu: bool = field(default=False, validator=instance_of(bool))
