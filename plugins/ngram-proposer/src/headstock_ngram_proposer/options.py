"""The options of `ngram`."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import and_, ge, instance_of, le


@frozen(kw_only=True)
class NgramOptions:
    """How guesses are looked up.

    max_drafts: maximum guesses of a row per step
    min_match: how many of the latest tokens must match
    max_match: how many are tried first; longer matches win
    """

    max_drafts: int = field(default=4, validator=and_(instance_of(int), ge(1), le(15)))
    min_match: int = field(default=2, validator=and_(instance_of(int), ge(1)))
    max_match: int = field(default=4, validator=and_(instance_of(int), ge(1)))

    def __attrs_post_init__(self) -> None:
        if self.max_match < self.min_match:
            raise ValueError(
                f"max_match is {self.max_match} and min_match is {self.min_match}; raise max_match "
                "or lower min_match"
            )
