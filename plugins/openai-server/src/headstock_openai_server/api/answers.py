"""Response bodies in the format of OpenAI's API."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

LEAST_LOGPROB = -9999.0
"""The substitute for minus infinity, which JSON cannot express."""


class Answer(msgspec.Struct, kw_only=True):
    """A body, or a part of one."""


class PromptTokensDetails(Answer, kw_only=True):
    """The prompt tokens that came from the prefix cache."""

    cached_tokens: int


class Usage(Answer, kw_only=True):
    """The token counts of a request, summed over its answers."""

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


class TopLogprob(Answer, kw_only=True):
    """A token and its log-probability; `bytes` is null for a part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprobs(TopLogprob, kw_only=True):
    """A token of an answer, and its likeliest alternatives."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer, kw_only=True):
    """The log-probabilities of a chat answer."""

    content: list[TokenLogprobs]
    refusal: None = None


class PromptLogprob(Answer, kw_only=True):
    """The log-probability of one token; rank 1 is the likeliest, null means not requested."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""Log-probabilities by prompt position and token id; the first position has none."""


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
    """A chat answer's message; `reasoning` has two names, since clients differ."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[AnsweredCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(Answer, kw_only=True):
    """One answer of a chat completion; `token_ids` are present only if requested."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(Answer, kw_only=True):
    """The answer of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class DeltaFunction(Answer, kw_only=True, omit_defaults=True):
    """A chunk's addition to the function of a call: first its name, then its arguments."""

    name: str | None = None
    arguments: str | msgspec.UnsetType = msgspec.UNSET


class DeltaCall(Answer, kw_only=True, omit_defaults=True):
    """A chunk's addition to a call; `id` and `type` come with the name."""

    index: int
    id: str | None = None
    type: str | None = None
    function: DeltaFunction


class Delta(Answer, kw_only=True, omit_defaults=True):
    """A chunk's addition to a message."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[DeltaCall] | None = None


class ChunkChoice(Answer, kw_only=True):
    """A chunk's addition to one answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


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
    """One answer of a completion, or a chunk's addition to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class Completion(Answer, kw_only=True):
    """The answer of `/v1/completions`."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class Chunk(Answer, kw_only=True):
    """A chunk of a stream. `usage`, `timings` and `prompt_token_ids` are present only if requested,
    and the last in the first chunk alone.
    """

    id: str
    object: str
    created: int
    model: str
    choices: list[Any]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    timings: Timings | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class Model(Answer, kw_only=True):
    """A served model."""

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


class Aborted(Answer, kw_only=True):
    """How many requests were aborted."""

    aborted: int


class Done(Answer, kw_only=True):
    """What was asked for is done."""

    status: str


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
    """The answer of `/tokenizer_info`; it also has the other fields of tokenizer_config.json."""

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


class Load(Answer, kw_only=True):
    """The answer of `/load`: the number of requests that run or wait."""

    server_load: int


class Version(Answer, kw_only=True):
    """The answer of `/version`."""

    version: str


class LiveLane(Answer, kw_only=True):
    """A request and its token counts: in the prompt, cached ones among these, computed ones, and
    all that are known.
    """

    id: str
    prompt: int
    cached: int
    computed: int
    known: int


class LiveNode(Answer, kw_only=True):
    """Consecutive pages shared by the same requests; the parent's index, -1 for none."""

    parent: int
    pages: int
    requests: int


class LiveTimes(Answer, kw_only=True):
    """Over all requests so far: the number of measured times, and their sum in seconds."""

    first_token: tuple[int, float]
    token_gap: tuple[int, float]


class LiveHistory(Answer, kw_only=True):
    """The last two minutes, a value for each second, oldest first.

    ages: seconds from the end of each second to this answer
    running, waiting, pool_usage: at that end; the last is the share of KV pages in use
    output_rate, step_rate: tokens and device steps per second
    first_token, token_gap: averages in seconds; null if nothing was measured in that second
    """

    ages: list[float]
    running: list[int]
    waiting: list[int]
    pool_usage: list[float]
    output_rate: list[float]
    step_rate: list[float]
    first_token: list[float | None]
    token_gap: list[float | None]


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
    history: LiveHistory
    running: list[LiveLane]
    waiting: list[LiveLane]
    num_running: int
    num_waiting: int
    page_size: int
    page_maps: list[str]
    tree: list[LiveNode]
