"""One prompt on its way to a score: its two requests, and the updates that bring it."""

from __future__ import annotations

import math

from attrs import evolve

from headstock.outputs import RequestMetrics, ScoreOutput, Update
from headstock.sampling_params import SamplingParams
from headstock.scheduler.request import Request
from headstock.text.prompt import Prompt


class ScoreRequest:
    """A checked prompt and its two requests to the engine, one for each of two next tokens.

    Its score is the probability of `true_id` where one of the two comes next. Log-probabilities are
    the model's own, so that each request may sample no other token than the one it is about. The
    second request finds the first one's pages in the prefix index.
    """

    # A request reports its own token and the likeliest ones: the other of the two may not be among
    # them.

    def __init__(
        self,
        request_id: str,
        prompt: Prompt,
        true_id: int,
        false_id: int,
        *,
        priority: int = 0,
        user: str = "",
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.requests = tuple(
            Request(
                id=f"{request_id}-{name}",
                prompt=prompt.ids,
                max_tokens=1,
                params=SamplingParams(
                    temperature=0.0, max_tokens=1, allowed_token_ids=(token,), logprobs=0
                ),
                priority=priority,
                user=user,
                namespace=prompt.cache_salt,
            )
            for name, token in (("true", true_id), ("false", false_id))
        )
        self.logprobs: dict[str, float] = {}
        self.errors: dict[str, str] = {}
        self.metrics = RequestMetrics(arrival=0.0)

    @property
    def must_stream(self) -> bool:
        """Never: each request has one update."""
        return False

    def mark_submitted(self, request: Request, seconds: float) -> None:
        """Note that `request` goes to the engine at `seconds`; the first one sets the arrival."""
        if request is self.requests[0]:
            self.metrics = evolve(self.metrics, arrival=seconds)

    def apply_update(self, update: Update, seconds: float) -> ScoreOutput | None:
        """The output, if `update`, the one of its request, is the last that was missing."""
        if update.logprobs:
            self.logprobs[update.id] = update.logprobs[0].logprob
        else:
            reason = update.error or "the request was aborted: the engine was closed"
            self.errors[update.id] = reason
        if update.id == self.requests[0].id:
            # The other request finds in the cache what this one computed.
            self.metrics = evolve(
                self.metrics,
                queue_seconds=update.queue_seconds,
                cached_tokens=update.cached_tokens,
                first_token=seconds,
            )
        if not self.is_finished:
            return None
        self.metrics = evolve(self.metrics, end=seconds)
        return self.output

    @property
    def is_finished(self) -> bool:
        """Whether both updates are there."""
        return len(self.logprobs) + len(self.errors) == len(self.requests)

    def has_ended(self, request_id: str) -> bool:
        """Whether the update of this request is there."""
        return request_id in self.logprobs or request_id in self.errors

    @property
    def output(self) -> ScoreOutput:
        """The score, once both updates are there."""
        assert self.is_finished, "internal error: the prompt is not scored yet"
        for error in self.errors.values():
            return ScoreOutput(score=math.nan, error=error)
        yes, no = (self.logprobs[request.id] for request in self.requests)
        return ScoreOutput(score=take_sigmoid(yes - no))


def take_sigmoid(odds: float) -> float:
    """The probability of these log odds."""
    if odds >= 0:
        return 1.0 / (1.0 + math.exp(-odds))
    # The other form would overflow, and lose the digits of small probabilities.
    power = math.exp(odds)
    return power / (1.0 + power)
