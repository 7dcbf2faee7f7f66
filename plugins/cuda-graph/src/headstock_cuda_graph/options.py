"""The options of `cudagraph`."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import ge, instance_of, le


@frozen(kw_only=True)
class GraphOptions:
    """Which steps with prompt tokens are replayed as one graph; the others go in pieces.

    `whole_rows`: those of up to so many rows; of up to 16 of these in steps of more than 4,096
    tokens, and where another backend attends for rows that decode. 0: none.

    `short_context`: where all rows have up to so many tokens, steps of up to 1,024 tokens have a
    graph of their own. A backend that reads a row's keys in parts may read short rows in one: `fa`
    does so up to 1,024.

    `mixed_context`: steps of more tokens, in which rows decode, where all rows have up to so many.
    They read long rows in one part, which takes longer than pieces then.
    """

    whole_rows: int = field(default=256, validator=[instance_of(int), ge(0), le(512)])
    short_context: int = field(default=1024, validator=[instance_of(int), ge(1)])
    mixed_context: int = field(default=8192, validator=[instance_of(int), ge(1)])
