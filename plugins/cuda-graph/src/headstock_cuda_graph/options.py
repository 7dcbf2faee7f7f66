"""The options of `cudagraph`."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import ge, instance_of, le


@frozen(kw_only=True)
class GraphOptions:
    """Which steps with prompt tokens are replayed as one graph; others run in pieces.

    `whole_rows`: those of up to this number of rows; of up to 16 of them in steps of more than
    4,096 tokens, and if another backend attends for decode rows. 0: none.

    `short_context`: if all rows have up to this number of tokens, steps of up to 1,024 tokens use
    a separate graph. A backend that reads a row's keys in parts may read short rows in one: `fa`
    does so up to 1,024.

    `mixed_context`: larger steps with decode rows, if all rows have up to this number of tokens.
    They read each row in one part, which is slower than pieces for longer rows.
    """

    whole_rows: int = field(default=256, validator=[instance_of(int), ge(0), le(512)])
    short_context: int = field(default=1024, validator=[instance_of(int), ge(1)])
    mixed_context: int = field(default=8192, validator=[instance_of(int), ge(1)])
