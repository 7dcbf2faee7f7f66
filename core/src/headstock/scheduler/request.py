"""Requests, as the scheduler sees them."""

from __future__ import annotations

from typing import Any

from attrs import evolve, field, frozen

from headstock.spi.arrays import Ints


@frozen(kw_only=True, eq=False)
class Request:
    """One sequence to generate.

    prompt: [n] int32, at least one token
    max_tokens, min_tokens: of the output
    stop_ids: any of them ends the request once `min_tokens` are out
    priority: higher goes first
    namespace: requests of different namespaces never share pages
    wait_for_sample: each step waits for the token of the one before, as a logit rule on the host
        needs
    prompt_logprobs: every prompt position gets logits, so no cached prefix is used
    params: for the sampler alone
    """

    id: str
    prompt: Ints = field(repr=lambda prompt: f"<{len(prompt)} tokens>")
    max_tokens: int
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    priority: int = 0
    namespace: str = ""
    wait_for_sample: bool = False
    prompt_logprobs: bool = False
    params: Any = None

    @property
    def max_len(self) -> int:
        """The length at which the request ends."""
        return len(self.prompt) + self.max_tokens


@frozen(kw_only=True, eq=False)
class RequestState:
    """A request and its progress, in the queue or in a row.

    tokens: [n] int32, prompt and output known when it was last queued
    arrival: numbers requests in the order they came; a preempted request keeps it, and so its place
        in the queue
    """

    request: Request
    tokens: Ints = field(repr=False)
    arrival: int
    preemptions: int = 0

    @property
    def priority_key(self) -> tuple[int, int]:
        """The sort key: requests with smaller keys go first."""
        return (-self.request.priority, self.arrival)

    def requeued(self, tokens: Ints) -> RequestState:
        """Return the state as it goes back to the queue with `tokens` known."""
        return evolve(self, tokens=tokens, preemptions=self.preemptions + 1)
