"""One live request, from its submission to its last update."""

from __future__ import annotations

from typing import Any

from attrs import define, field

from headstock.grammar import FollowedRequest
from headstock.outputs import TokenLogprob, Update
from headstock.scheduler import Request
from headstock.spi.arrays import Ints

MAX_CREDIT = 4
"""How many rejected verifications in a row it takes at most until a row rests."""
MAX_REST_LEVEL = 4
"""A row rests for 4, 16, 64, then 256 tokens."""


@define(eq=False)
class DraftHistory:
    """What drafts of a running request are made from.

    tokens: [max_len] int32; the first `length` are known
    max_len: the length at which the request ends
    score: accepted drafts lately, less the verifications in which none was right
    rest: tokens to sample before the next guess
    is_held: the row sits out until its token in flight is known
    """

    tokens: Ints
    length: int
    max_len: int
    score: int = 0
    rest: int = 0
    is_held: bool = False

    def append(self, tokens: Ints) -> None:
        """Append tokens, which come from the row's rest."""
        self.tokens[self.length : self.length + len(tokens)] = tokens
        self.length += len(tokens)
        self.rest = max(self.rest - len(tokens), 0)

    def count_hits(self, hits: int) -> None:
        """Note how many drafts were right; after too many misses the row rests."""
        if hits:
            self.score = min(max(self.score, -1) + hits, MAX_CREDIT)
            return
        self.score = max(self.score - 1, -MAX_REST_LEVEL)
        # Each try takes the row out of the overlap for two steps. Where none is right, tries must
        # become so rare that they cost next to nothing.
        if self.score < 0:
            self.rest = 4**-self.score


@define(eq=False)
class TrackedRequest:
    """One live request, from its submission on, and what its updates have carried so far.

    number: counts all that were ever submitted
    stream_tokens: every token is an update; without it only the first token and the end are
    prompt_pages: how many pages its prompt takes, [groups] int64
    arrival: in seconds of `time.monotonic`
    admission_id: of its last admission, 0 before the first
    num_emitted: how many output tokens its updates have carried
    cached_tokens: prompt tokens from the prefix index at the first admission, None before
    queue_seconds: from its arrival to the first admission
    logprobs, prompt_logprobs: those that no update has carried yet; prompt_logprobs by position
    embedding: of a request that pools, once its whole prompt is pooled
    followed: the grammar that rules its answer
    drafts: since its last admission, where a proposer is asked
    """

    request: Request
    stream_tokens: bool
    prompt_pages: Ints
    arrival: float
    number: int = 0
    admission_id: int = 0
    num_emitted: int = 0
    cached_tokens: int | None = None
    queue_seconds: float | None = None
    logprobs: list[TokenLogprob] = field(factory=list)
    prompt_logprobs: dict[int, TokenLogprob] = field(factory=dict)
    embedding: tuple[float, ...] | None = None
    followed: FollowedRequest | None = None
    drafts: DraftHistory | None = None

    def make_update(self, tokens: list[int], **end: Any) -> Update:
        """Make the update with the next `tokens`; `end` has the fields of an end."""
        if self.num_emitted and not self.logprobs and not end:  # as most are
            self.num_emitted += len(tokens)
            return Update(id=self.request.id, tokens=tuple(tokens))
        changes: dict[str, Any] = {"id": self.request.id, "tokens": tuple(tokens), **end}
        if tokens and not self.num_emitted:
            changes["cached_tokens"] = self.cached_tokens
            changes["queue_seconds"] = self.queue_seconds
            if self.request.prompt_logprobs:
                changes["prompt_logprobs"] = tuple(
                    map(self.prompt_logprobs.get, range(len(self.request.prompt)))
                )
        if self.logprobs:
            changes["logprobs"], self.logprobs = tuple(self.logprobs), []
        self.num_emitted += len(tokens)
        return Update(**changes)

    def make_last_update(self, tokens: Ints, reason: str, **end: Any) -> Update:
        """Make the last update.

        tokens: [n] int32, the whole prompt and output
        """
        if self.request.pooling and reason == "stop":
            end |= {"embedding": self.embedding, "cached_tokens": self.cached_tokens}
        new_tokens = tokens[len(self.request.prompt) + self.num_emitted :].tolist()
        return self.make_update(new_tokens, finish_reason=reason, **end)
