"""Split a token budget among rows."""

from __future__ import annotations

import numpy as np

from headstock.spi import View
from headstock.spi.arrays import Ints

NONE: Ints = np.zeros(0, np.int32)
"""No rows."""
NONE.flags.writeable = False


def split_budget(view: View, rows: Ints, tokens: int) -> tuple[Ints, Ints]:
    """Give the rows, in this order, their new tokens until `tokens` are used up.

    returns: the rows that got some and how many each, [n] int32
    """
    totals = np.minimum(np.cumsum(view.num_new_tokens[rows]), tokens)
    counts = np.diff(totals, prepend=0).astype(np.int32)
    return rows[counts > 0], counts[counts > 0]
