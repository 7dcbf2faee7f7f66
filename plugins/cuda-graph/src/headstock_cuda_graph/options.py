"""The options of `cudagraph`."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import ge, instance_of, le


@frozen(kw_only=True)
class GraphOptions:
    """Which steps with prompt tokens are replayed as one graph; the others go in pieces.

    `whole_rows`: those of up to so many rows; of up to 16 of these in steps of more than 4,096
    tokens, and where another backend attends for rows that decode. 0: none.

    `whole_context`: those whose rows have up to so many tokens, where none decodes. In one graph a
    row's keys are read in one part, as is best for short rows; in pieces attention sees the
    lengths.

    `mixed_context`: the same, of all rows, where some decode. Tokens of the step before wait while
    the host launches pieces.
    """

    whole_rows: int = field(default=256, validator=[instance_of(int), ge(0), le(512)])
    whole_context: int = field(default=2048, validator=[instance_of(int), ge(1)])
    mixed_context: int = field(default=8192, validator=[instance_of(int), ge(1)])
