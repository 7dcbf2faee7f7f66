"""The options of `draft`."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import and_, ge, gt, instance_of, le, lt


@frozen(kw_only=True)
class DraftOptions:
    """How many tokens are guessed, and what the second model may take.

    max_drafts: guesses of a row per step
    memory_ratio: the share of the device's free memory for weights and KV pool of the second model
    """

    max_drafts: int = field(default=4, validator=and_(instance_of(int), ge(1), le(15)))
    memory_ratio: float = field(default=0.2, validator=and_(instance_of(float), gt(0.0), lt(1.0)))
