"""What can be set of this family."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import in_, instance_of


@frozen(kw_only=True)
class TransformersOptions:
    """Options of `transformers`.

    experts: which of transformers' implementations multiplies experts; auto: its own choice
    exchange: whether the operations of `--ops` compute the modules that are equal to them
    """

    experts: str = field(
        default="auto", validator=in_(("auto", "eager", "batched_mm", "grouped_mm"))
    )
    exchange: bool = field(default=True, validator=instance_of(bool))
