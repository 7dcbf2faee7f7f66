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


class Timings(Answer, kw_only=True):
    """Seconds from a request's arrival to its first token and to its last, by the server's clock,
    and tokens a second over all of it; null before there are any.
    """

    ttft: float | None
    total: float | None
    tokens_per_second: float | None


class Embedding(Answer, kw_only=True):
    """The vector of one input: numbers, or base64 of little-endian float32."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Answer, kw_only=True):
    """The tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Answer, kw_only=True):
    """The answer of `/v1/embeddings`."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


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


class PromptLogprob(Answer, kw_only=True):
    """The log-probability of one token; rank 1 is the likeliest, null is beyond those asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""By position of a prompt, and by token id; the first position has none."""


class AnsweredFunction(Answer, kw_only=True):
    """The function of a call; `arguments` is JSON as the model wrote it."""

    name: str
    arguments: str


class AnsweredCall(Answer, kw_only=True):
    """A call of a tool in a chat answer."""

    id: str
    type: Literal["function"] = "function"
    function: AnsweredFunction


class AssistantMessage(Answer, kw_only=True):
    """A chat answer's message; `reasoning` has two names, and clients read either."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[AnsweredCall] | msgspec.UnsetType = msgspec.UNSET


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
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class DeltaFunction(Answer, kw_only=True, omit_defaults=True):
    """What a chunk adds to the function of a call: first its name, then arguments."""

    name: str | None = None
    arguments: str | msgspec.UnsetType = msgspec.UNSET


class DeltaCall(Answer, kw_only=True, omit_defaults=True):
    """What a chunk adds to a call; `id` and `type` come with the name."""

    index: int
    id: str | None = None
    type: str | None = None
    function: DeltaFunction


class Delta(Answer, kw_only=True, omit_defaults=True):
    """What a chunk adds to a message."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[DeltaCall] | None = None


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
    """One answer of a completion, or the addition of a chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class Completion(Answer, kw_only=True):
    """The answer of `/v1/completions`."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class Chunk(Answer, kw_only=True):
    """A chunk of a stream. `usage` and `timings` are left out unless they were asked for."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Any]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    timings: Timings | msgspec.UnsetType = msgspec.UNSET


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


class ModelInfo(Answer, kw_only=True):
    """The model information that routers query, under SGLang's names."""

    model_path: str
    tokenizer_path: str
    is_generation: bool = True


class ServerInfo(Answer, kw_only=True):
    """The server information that routers query, under SGLang's names."""

    model_path: str
    served_model_name: str
    version: str
    tp_size: int
    dp_size: int = 1
    max_model_len: int


class TokenizeAnswer(Answer, kw_only=True):
    """The answer of `/tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeAnswer(Answer, kw_only=True):
    """The answer of `/detokenize`."""

    prompt: str


class TokenizerInfo(Answer, kw_only=True):
    """The answer of `/tokenizer_info`, which has all else of tokenizer_config.json too."""

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | msgspec.UnsetType = msgspec.UNSET


class Health(Answer, kw_only=True, omit_defaults=True):
    """The answer of `/health`: "ok", or the reason why the server cannot serve."""

    status: str
    stage: str | None = None
    completed: int | None = None
    total: int | None = None


class Version(Answer, kw_only=True):
    """The answer of `/version`."""

    version: str


class LiveLane(Answer, kw_only=True):
    """A request: the tokens of its prompt, those of them that were cached, those that are computed,
    and those that are known.
    """

    id: str
    prompt: int
    cached: int
    computed: int
    known: int


class LiveNode(Answer, kw_only=True):
    """Pages in a row that the same requests share; the parent's index, -1 for none."""

    parent: int
    pages: int
    requests: int


class LiveTimes(Answer, kw_only=True):
    """Of all requests so far: how many times were measured, and their sum in seconds."""

    first_token: tuple[int, float]
    token_gap: tuple[int, float]


class LiveView(Answer, kw_only=True):
    """The answer of `/live`.

    counts: of the engine, since its start and now
    running, waiting: the first 64 of them, as of the last step before the last call
    page_maps: by KV group, a digit for each page, or for several that lie side by side: 0 free,
        1 cached, 2 of one request, 3 of several
    tree: the prefixes that running requests share, parents before children
    """

    counts: dict[str, int]
    times: LiveTimes
    running: list[LiveLane]
    waiting: list[LiveLane]
    num_running: int
    num_waiting: int
    page_size: int
    page_maps: list[str]
    tree: list[LiveNode]
