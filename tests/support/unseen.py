"""What collections of garbage need not look at."""

from __future__ import annotations

import gc


def leave_out_of_collections() -> None:
    """Thousands of tests and what they import stay as long as the process: a full collection that
    looked at them took a third of a second, and each engine that is built asks for some.
    """
    gc.collect()
    gc.freeze()
