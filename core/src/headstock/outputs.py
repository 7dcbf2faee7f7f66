"""What a request gave: text, tokens, reasons and times. Names are vLLM's."""

from __future__ import annotations

from attrs import frozen


@frozen
class Logprob:
    """The log-probability of one token; `rank` 1 is the likeliest, None is one below those asked
    for.
    """

    logprob: float
    rank: int | None
    decoded_token: str


@frozen(kw_only=True)
class RequestMetrics:
    """When things happened to a request, in seconds of `time.monotonic`; None for what did not, or
    is not known.

    `arrival` is the moment it was handed to the engine; `cached_tokens` are prompt tokens taken
    from the prefix index.
    """

    arrival: float
    first_token: float | None = None
    end: float | None = None
    cached_tokens: int | None = None
    preemptions: int | None = None

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def total(self) -> float | None:
        """Seconds from arrival to the end."""
        return None if self.end is None else self.end - self.arrival


@frozen(kw_only=True)
class CompletionOutput:
    """One answer, or, in a stream, what is new of it.

    `finish_reason` is None while it goes on, then "stop", "length", "abort" or "error" (`error`
    says what went wrong); `stop_reason` is the stop string or the id among `stop_token_ids` that
    ended it, None when an end-of-sequence token did. `token_ids` hold the token that ended it,
    `text` does not. `logprobs`, when asked for, is one mapping a token, from id to Logprob.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None = None
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None


@frozen(kw_only=True)
class RequestOutput:
    """The answers to one prompt; `prompt` is None when it was given as token ids.

    `max_tokens` is the most that an answer could have: what was asked for, cut to the room beside
    the prompt. `prompt_logprobs`, when asked for, has one entry a prompt token, the first of them
    None.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    metrics: RequestMetrics
    max_tokens: int
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None = None

    @property
    def finished(self) -> bool:
        """Whether every answer in it has ended."""
        return all(output.finish_reason is not None for output in self.outputs)

    @property
    def num_output_tokens(self) -> int:
        """Tokens in all its answers."""
        return sum(len(output.token_ids) for output in self.outputs)

    @property
    def sound(self) -> bool:
        """Whether no answer in it failed."""
        return all(output.error is None for output in self.outputs)


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
