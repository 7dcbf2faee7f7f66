"""The options of `llguidance`."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import and_, ge, instance_of, le


@frozen(kw_only=True)
class LLGuidanceOptions:
    """How answers are constrained.

    whitespace: white space between the tokens of JSON
    threads: that fill the masks of several answers; 0 for llguidance's own choice
    """

    whitespace: bool = field(default=False, validator=instance_of(bool))
    threads: int = field(default=1, validator=and_(instance_of(int), ge(0), le(64)))
