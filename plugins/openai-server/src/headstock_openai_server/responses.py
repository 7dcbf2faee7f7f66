"""The bodies of answers, as OpenAI's API has them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

LEAST_LOGPROB = -9999.0
"""What stands for minus infinity, which JSON cannot write."""


class Answer(msgspec.Struct, kw_only=True):
    """A body, or a part of one."""


class PromptTokensDetails(Answer, kw_only=True):
    """Which prompt tokens were not computed."""

    cached_tokens: int


class Usage(Answer, kw_only=True):
    """The tokens of a request, all of its answers together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(Answer, kw_only=True):
    """A token and its log-probability; `bytes` is null for a part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprobs(TopLogprob, kw_only=True):
    """A token of an answer, and the likeliest tokens in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer, kw_only=True):
    """The log-probabilities of a chat answer."""

    content: list[TokenLogprobs]
    refusal: None = None


class AssistantMessage(Answer, kw_only=True):
    """A chat answer's message."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(Answer, kw_only=True):
    """One answer of a chat completion."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None


class ChatCompletion(Answer, kw_only=True):
    """The answer of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Delta(Answer, kw_only=True, omit_defaults=True):
    """What a chunk adds to a message."""

    role: str | None = None
    content: str | None = None


class ChunkChoice(Answer, kw_only=True):
    """What a chunk adds to one answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class LastChunkChoice(ChunkChoice, kw_only=True):
    """The chunk that ends an answer."""

    stop_reason: int | str | None = None


class CompletionLogprobs(Answer, kw_only=True):
    """The log-probabilities of a completion; `text_offset` counts characters of its text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Answer, kw_only=True):
    """One answer of a completion, or what a chunk adds to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Completion(Answer, kw_only=True):
    """The answer of `/v1/completions`."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class Chunk(Answer, kw_only=True):
    """A chunk of a stream. `usage` is left out unless it was asked for."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Any]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class Model(Answer, kw_only=True):
    """A model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "headstock"
    root: str
    max_model_len: int


class ModelList(Answer, kw_only=True):
    """The answer of `/v1/models`."""

    object: Literal["list"] = "list"
    data: list[Model]


class TokenizeAnswer(Answer, kw_only=True):
    """The answer of `/tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeAnswer(Answer, kw_only=True):
    """The answer of `/detokenize`."""

    prompt: str


class Health(Answer, kw_only=True, omit_defaults=True):
    """The answer of `/health`: "ok", or what keeps the server from serving."""

    status: str
    stage: str | None = None
    completed: int | None = None
    total: int | None = None


class Version(Answer, kw_only=True):
    """The answer of `/version`."""

    version: str
