"""What the scheduler is told."""

from __future__ import annotations

from attrs import field, frozen

from headstock.scheduler.request import Request
from headstock.scheduler.row_counters import NONE
from headstock.spi.arrays import Ints


@frozen
class Arrived:
    """A new request; it must fit (see `limits.refusal`)."""

    request: Request


@frozen(eq=False)
class Sampled:
    """Tokens of rows whose plan had logits, ragged: row i got `counts[i]` accepted tokens, laid end
    to end in `tokens`.

    `counts` None: each row got the one token that it was promised.

    rows, orders, counts: [n] int32; `orders` are the admission numbers of the plan, so that late
    news of a released row is dropped
    tokens: [sum of counts] int32
    draft_counts: [n] int32 and drafts: [their sum] int32, guesses to be verified next (none by
        default)
    """

    rows: Ints
    orders: Ints
    counts: Ints | None
    tokens: Ints
    draft_counts: Ints = NONE
    drafts: Ints = NONE


@frozen
class Aborted:
    """The request of this id is no longer wanted; nothing happens when it is unknown or already
    ended.
    """

    id: str
    reason: str = "abort"


@frozen(eq=False)
class Failed:
    """Rows whose step went wrong.   rows, orders: [n] int32"""

    rows: Ints
    orders: Ints


@frozen
class Cleared:
    """The prefix index is to forget every page that no row holds."""


Event = Arrived | Sampled | Aborted | Failed | Cleared


@frozen(kw_only=True, eq=False)
class Ended:
    """A request that ended in this step, and why: "stop", "length", "abort", "error", or what an
    abort gave as its reason.

    tokens: [n] int32, prompt and output `row` is the seat it had, -1 when it had none; `cached`
    counts the prompt tokens taken from the index.
    """

    id: str
    row: int
    order: int
    reason: str
    tokens: Ints = field(repr=False)
    cached: int
    preemptions: int
