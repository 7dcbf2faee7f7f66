"""The outputs of requests: text, tokens, finish reasons and times. The names are vLLM's.

One type a hop: a runner returns a `Sample`, the scheduler takes it as a `Sampled` event, the engine
emits an `Update` a request, and users get `RequestOutput` with `CompletionOutput` in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from attrs import field, frozen

__all__ = [
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "ScoreOutput",
    "TokenLogprob",
    "ToolCall",
    "Update",
]


@frozen
class Logprob:
    """The log-probability of one token.

    rank: 1 is the likeliest; below the requested ones, how many tokens are as likely or likelier,
        itself among them
    decoded_token: what the token adds to the text, so that those of an answer, joined, are its
        text; empty for a part of a character but the last one; of a special token that the text
        leaves out, its own
    """

    logprob: float
    rank: int | None
    decoded_token: str


@frozen(kw_only=True)
class RequestMetrics:
    """Times of a request in seconds of `time.monotonic`, and its counts; None for what is unknown
    or has not happened.

    arrival: when it was handed to the engine
    queue_seconds: how long it waited for a row
    cached_tokens: prompt tokens from the prefix index
    """

    arrival: float
    queue_seconds: float | None = None
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


@frozen
class ToolCall:
    """A call of a tool in an answer.

    In a stream, the first piece of a call has its id and its name, which later ones lack, and each
    has the arguments that are new.

    index: counts the calls of an answer
    arguments: JSON as the model wrote it, checked by nothing
    offset: the characters of the answer's `text` that come before the call, in its first piece
    """

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""
    offset: int = 0


@frozen(kw_only=True)
class CompletionOutput:
    """The user's type of one completion: all of it, or, in a stream, what is new.

    text: without the token that ended it
    token_ids: with the token that ended it
    logprobs: if requested, one mapping a token, from id to Logprob
    finish_reason: None while it goes on; then "stop", "length", "tool_calls", "abort" or "error"
    stop_reason: the stop string, or the id among `stop_token_ids`, that ended it; None after an
        end-of-sequence token
    error: the message of "error"
    reasoning, tool_calls: parts of the answer that `text` is without, where answers are divided
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()


@frozen(kw_only=True)
class RequestOutput:
    """The user's type of one prompt: its completions, or, in a stream, what is new of one.

    prompt: None when it was given as token ids
    max_tokens: the most tokens of a completion: the requested ones, cut to the room after the
        prompt
    prompt_logprobs: if requested, one entry a prompt token, the first of them None
    """

    request_id: str
    prompt: str | None
    # The running request reads the same memory: callers get copies, in `prompt_token_ids`.
    _prompt_tokens: Sequence[int] = field(repr=lambda tokens: repr(list(tokens)))
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    max_tokens: int
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    # Made for those who read it: of 256 prompts of 2,176 ids the lists take the interpreter 6 ms,
    # and its garbage collector 4, while the engine needs it.
    @cached_property
    def prompt_token_ids(self) -> list[int]:
        """The token ids of the prompt."""
        return list(self._prompt_tokens)

    @property
    def finished(self) -> bool:
        """Whether all of its completions have ended."""
        return all(output.finish_reason is not None for output in self.outputs)

    @property
    def num_cached_tokens(self) -> int | None:
        """The prompt tokens that came from the prefix index; None before the first token."""
        return self.metrics.cached_tokens

    @property
    def num_output_tokens(self) -> int:
        """The tokens of all its completions."""
        return sum(len(output.token_ids) for output in self.outputs)

    @property
    def sound(self) -> bool:
        """Whether none of its completions failed."""
        return all(output.error is None for output in self.outputs)


@frozen(kw_only=True)
class EmbeddingOutput:
    """The vector of one prompt.

    embedding: as long as a hidden state of the model; empty when the prompt failed or was aborted
    error: why there is none
    """

    embedding: list[float]
    error: str | None = None


@frozen(kw_only=True)
class EmbeddingRequestOutput:
    """The user's type of one prompt's embedding.

    prompt: None when it was given as token ids
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: EmbeddingOutput
    metrics: RequestMetrics

    @property
    def finished(self) -> bool:
        """Always: an embedding comes whole."""
        return True

    @property
    def num_cached_tokens(self) -> int | None:
        """Prompt tokens that the prefix index spared."""
        return self.metrics.cached_tokens


@frozen(kw_only=True)
class ScoreOutput:
    """The score of a document against a query: a probability, or a cosine.

    error: why there is none; the score is NaN then
    """

    score: float
    error: str | None = None


@frozen
class TokenLogprob:
    """A token, its log-probability, and the likeliest tokens with theirs, best first.

    rank: how many tokens are as likely as it or likelier, itself among them; None where an engine
        elsewhere does not say
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None


@frozen
class Update:
    """The engine's type: the new tokens of one request since its last update.

    tokens: with a stop token as the last
    logprobs: one entry a token
    prompt_logprobs, cached_tokens, queue_seconds: in the update with the first token or the
        embedding only; the first entry of prompt_logprobs is None, cached_tokens are prompt tokens
        from the prefix index, queue_seconds passed before the request had a row
    embedding: of a request that pools, in its last update
    finish_reason: in the last update only: "stop", "length", "abort" or "error", with
        `stop_token` or `error`
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
    # No part of what was answered: two runs give equal updates.
    queue_seconds: float | None = field(default=None, eq=False)
    embedding: tuple[float, ...] | None = None
