"""Requests, as the scheduler sees them."""

from __future__ import annotations

from typing import Any

from attrs import evolve, field, frozen

from headstock.spi.arrays import Ints


@frozen(kw_only=True, eq=False)
class Request:
    """One sequence to generate.

    prompt: [n] int32, at least one token

    `max_tokens` and `min_tokens` count output tokens; any of `stop_ids` ends the request once
    `min_tokens` are out. Requests of different namespaces never share pages. With
    `wait_for_sample` each step waits for the token of the one before, which a rule on the host
    needs. `prompt_logprobs` asks for logits of every prompt position, so cached prefixes are no
    use. `params` is for the sampler alone.
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
    """A request and how far it came: what waits in the queue, and what sits in a seat.

    tokens: [n] int32, prompt and output known when it was last queued

    `arrival` numbers requests in the order they came. With the priority it gives the place in the
    queue, which a preempted request keeps.
    """

    request: Request
    tokens: Ints = field(repr=False)
    arrival: int
    preemptions: int = 0

    @property
    def priority_key(self) -> tuple[int, int]:
        """Sorts before every entry it goes ahead of."""
        return (-self.request.priority, self.arrival)

    def requeued(self, tokens: Ints) -> RequestState:
        """The entry as it goes back to the queue with `tokens` known."""
        return evolve(self, tokens=tokens, preemptions=self.preemptions + 1)
