"""The scheduler's input: what happened since the last step."""

from __future__ import annotations

from attrs import field, frozen

from headstock.scheduler.request import Request
from headstock.scheduler.row_counters import NONE
from headstock.spi.arrays import Ints


@frozen
class Arrived:
    """A new request; it must fit (see `limits.find_refusal`)."""

    request: Request


@frozen(eq=False)
class Sampled:
    """The scheduler's type: sampled tokens of rows, ragged: row i got `counts[i]` of `tokens`.

    Without `counts`, each row got the one token of its placeholder, and the rest is empty.

    rows, admission_ids, counts: [n] int32
    tokens: [sum of counts] int32
    draft_counts: [n] int32, drafts: [sum of draft_counts] int32, tokens to verify next, -1 for
        those that the device alone knows; only for rows without a token in flight
    hold: [n] int32, 1 where the row runs no further before its token in flight is known, because
        drafts are likely then; empty for none

    The event comes a step late under overlap, when the row may have another request. The plan's
    `admission_ids` tell, and such samples are dropped.
    """

    rows: Ints
    admission_ids: Ints
    counts: Ints | None
    tokens: Ints
    draft_counts: Ints = NONE
    drafts: Ints = NONE
    hold: Ints = NONE


@frozen
class Aborted:
    """End this request; an unknown id, or one that has ended, changes nothing."""

    id: str
    reason: str = "abort"


@frozen(eq=False)
class Pooled:
    """Rows whose prompts are computed and pooled; their requests end.

    rows, admission_ids: [n] int32
    """

    rows: Ints
    admission_ids: Ints


@frozen(eq=False)
class Failed:
    """Rows whose step failed.   rows, admission_ids: [n] int32"""

    rows: Ints
    admission_ids: Ints


@frozen
class Cleared:
    """Drop every page that no row holds from the prefix index."""


@frozen
class Paced:
    """Bound the prompt tokens of later steps that have decode rows.

    A scheduler that runs prompts first may give them the tokens of decode rows too.

    prompt_tokens: the most of such a step beyond the tokens of its decode rows, at least 1
    every_step: whether steps without decode rows are bounded too
    """

    prompt_tokens: int
    every_step: bool = False


@frozen
class Clock:
    """The time of the step: its first event, so that requests arrive at it.

    A step without one has the time of the step before.

    milliseconds: since the engine's start; they never go back
    """

    # An event like any other, so that what follows from the time is recorded and replays.
    milliseconds: int


Event = Arrived | Sampled | Aborted | Failed | Cleared | Paced | Clock | Pooled


@frozen(kw_only=True, eq=False)
class Ended:
    """A request that ended in this step.

    reason: "stop", "length", "abort", "error", or the reason that the abort gave; "stop" of a
        request that pools
    row: the row it had, -1 when it was still waiting
    tokens: [n] int32, prompt and output
    cached: prompt tokens taken from the index
    """

    id: str
    row: int
    admission_id: int
    reason: str
    tokens: Ints = field(repr=False)
    cached: int
    preemptions: int


@frozen(eq=False)
class Outcome:
    """What requests got from a step's events.

    accepted_ids, accepted_counts: [n] int32, the admission ids that got tokens, and how many
    accepted_tokens: [sum of the counts] int32
    ended: the requests that ended
    """

    accepted_ids: Ints
    accepted_counts: Ints
    accepted_tokens: Ints
    ended: tuple[Ended, ...]
