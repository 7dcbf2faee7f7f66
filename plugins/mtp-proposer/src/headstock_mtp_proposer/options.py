"""The options of `mtp`."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import and_, ge, instance_of, le


@frozen(kw_only=True)
class MtpOptions:
    """How many tokens are guessed.

    max_drafts: guesses of a row per step; the layers run once for each
    """

    max_drafts: int = field(default=2, validator=and_(instance_of(int), ge(1), le(15)))
