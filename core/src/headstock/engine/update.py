"""News of a request, as the engine tells it."""

from __future__ import annotations

from attrs import frozen


@frozen
class TokenLogprob:
    """A token, its log-probability, and the likeliest tokens with theirs, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@frozen(kw_only=True)
class Update:
    """What is new of one request since its last update.

    `tokens` are new output tokens, a stop token included as the last. `logprobs` has one entry a
    token; `prompt_logprobs` comes once, with the first token, its first entry None, and so does
    `cached_tokens`, the prompt tokens that came from the prefix index. `finish_reason` ("stop",
    "length", "abort", "error") is set in the last update, with `stop_token` or `error`.
    """

    id: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: str | None = None
    stop_token: int | None = None
    error: str | None = None
    cached_tokens: int | None = None
    preemptions: int = 0
