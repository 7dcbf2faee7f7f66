"""Requests, as the scheduler sees them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from attrs import evolve, field, frozen

from headstock.spi.arrays import Ints

PoolingKind = Literal["", "last", "mean"]
"""Which hidden states of a prompt make its vector: that of its last token, or the mean of all."""


@frozen(kw_only=True, eq=False)
class Request:
    """One sequence to generate, or one prompt whose hidden states are pooled.

    prompt: [n] int32, at least one token
    max_tokens, min_tokens: of the output; 0 with `pooling`
    stop_ids: any of them ends the request once `min_tokens` are out
    priority: higher goes first
    user: its user, for schedulers; "" for none
    adapter: the adapter that computes it; "" for the model alone
    namespace: requests of different namespaces, or adapters, never share pages;
        `prefix_namespace` is of both and of `variant`
    variant: a digest of what the request gives plugins that changes its keys and values; "" for
        nothing
    wait_for_sample: each step waits for the token of the one before, as a logit rule on the host
        needs
    prompt_logprobs: every prompt position gets logits
    pooling: the request ends when its prompt is computed, without a token
    extra_args: for plugins; the schedule depends on `variant` alone
    params, processor_values: for the sampler alone
    """

    id: str
    prompt: Ints = field(repr=lambda prompt: f"<{len(prompt)} tokens>")
    max_tokens: int
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    priority: int = 0
    user: str = ""
    adapter: str = ""
    namespace: str = ""
    variant: str = ""
    wait_for_sample: bool = False
    prompt_logprobs: bool = False
    extra_args: Mapping[str, Any] | None = None
    pooling: PoolingKind = ""
    params: Any = None
    processor_values: Any = ()
    # Worked out once: it is read whenever a page of the request fills.
    prefix_namespace: str = field(init=False, repr=False)

    @prefix_namespace.default
    def _join_namespace(self) -> str:
        """The namespace of its keys and values: an adapter, or a plugin, makes others of the same
        tokens.
        """
        # Unlike any other namespace, whatever characters a caller's has.
        if self.adapter or self.variant or self.namespace.startswith("\0"):
            parts = (f"{len(each)}:{each}" for each in (self.adapter, self.variant))
            return f"\0{''.join(parts)}{self.namespace}"
        return self.namespace

    @property
    def max_len(self) -> int:
        """The length at which the request ends."""
        return len(self.prompt) + self.max_tokens

    @property
    def max_computed(self) -> int:
        """How many of its tokens are computed at most: the last of an output never is."""
        return len(self.prompt) + max(self.max_tokens - 1, 0)

    @property
    def takes_prefix_hits(self) -> bool:
        """Whether cached pages spare the request work; they hold no logits and no hidden states."""
        return not self.prompt_logprobs and self.pooling != "mean"


@frozen(kw_only=True, eq=False)
class RequestState:
    """A request and its progress, in the queue or in a row.

    tokens: [n] int32, prompt and output known when it was last queued
    arrival: numbers requests in the order they came; a preempted request keeps it, and so its place
        in the queue
    arrived_at: the clock of the step that it arrived in, in milliseconds
    user, adapter: the numbers of these names, 0 for none
    """

    request: Request
    tokens: Ints = field(repr=False)
    arrival: int
    arrived_at: int = 0
    user: int = 0
    adapter: int = 0
    preemptions: int = 0

    @property
    def priority_key(self) -> tuple[int, int]:
        """The sort key: requests with smaller keys go first."""
        return (-self.request.priority, self.arrival)

    def requeued(self, tokens: Ints) -> RequestState:
        """Return the state as it goes back to the queue with `tokens` known."""
        return evolve(self, tokens=tokens, preemptions=self.preemptions + 1)
