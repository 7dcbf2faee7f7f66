"""The bodies of requests. Unsupported fields are refused by name, unless they change no token.

Names are OpenAI's, or vLLM's where OpenAI has none. `null` means the same as an absent field.
"""

from __future__ import annotations

from typing import Any, Literal

from headstock_openai_server.api.bodies import Body, NoEffect
from headstock_openai_server.api.structured_outputs import ResponseFormat, StructuredOutputsBody


class StreamOptions(Body, kw_only=True):
    """Options of a stream: what it reports besides output."""

    include_usage: bool | None = None
    include_timings: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Any = None


class EngineBody(Body, kw_only=True):
    """The fields of every request that generates text: most fields mean what the sampling parameter
    of their name means.
    """

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    user: str | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    allowed_token_ids: list[int] | None = None
    priority: int | None = None
    cache_salt: str | None = None
    extra_args: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    custom_labels: NoEffect = None
    early_stopping: NoEffect = None
    length_penalty: NoEffect = None
    media_io_kwargs: NoEffect = None
    metadata: NoEffect = None
    mm_processor_kwargs: NoEffect = None
    prediction: NoEffect = None
    prompt_cache_options: NoEffect = None
    prompt_cache_retention: NoEffect = None
    request_id: NoEffect = None
    rid: NoEffect = None
    service_tier: NoEffect = None
    store: NoEffect = None
    verbosity: NoEffect = None


class SamplingBody(EngineBody, kw_only=True):
    """The common fields of completions and chats. The second half only takes default values."""

    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsBody | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    guided_decoding_backend: Any = None
    guided_whitespace_pattern: Any = None

    bad_words: Any = None
    best_of: Any = None
    logits_processors: Any = None
    no_stop_trim: Any = None
    return_hidden_states: Any = None
    spaces_between_special_tokens: Any = None
    use_beam_search: Any = None


class CalledFunction(Body, kw_only=True):
    """A function call in a message; `arguments` is a JSON string, as the model generated it."""

    name: str
    arguments: str

    parsed_arguments: NoEffect = None
    provider_specific_fields: NoEffect = None


class MessageToolCall(Body, kw_only=True):
    """A call of a tool in an assistant's message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None

    cache_control: NoEffect = None
    caller: NoEffect = None
    provider_specific_fields: NoEffect = None


class FunctionBody(Body, kw_only=True):
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    cache_control: NoEffect = None


class ToolBody(Body, kw_only=True):
    """A tool that a request offers."""

    type: Literal["function"]
    function: FunctionBody

    cache_control: NoEffect = None


class ChosenFunction(Body, kw_only=True):
    """The name of a tool's function."""

    name: str


class ChosenTool(Body, kw_only=True):
    """A tool by the name of its function."""

    type: Literal["function"]
    function: ChosenFunction


class AllowedTools(Body, kw_only=True):
    """The tools that the model may call, and whether it must call one of them."""

    mode: Literal["auto", "required"]
    tools: list[ChosenTool]


class ToolChoice(Body, kw_only=True):
    """The `function` that the model must call, or with type allowed_tools those that it may."""

    type: str = "function"
    function: ChosenFunction | None = None
    allowed_tools: AllowedTools | None = None


class TextPart(Body, kw_only=True):
    """A text in the list of parts that a message's content may be."""

    type: Literal["text"]
    text: str

    annotations: NoEffect = None
    cache_control: NoEffect = None
    id: NoEffect = None
    prompt_cache_breakpoint: NoEffect = None


class ChatMessage(Body, kw_only=True):
    """One message of a conversation."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None

    audio: Any = None
    function_call: Any = None
    refusal: Any = None

    annotations: NoEffect = None
    cache_control: NoEffect = None
    id: NoEffect = None
    parsed: NoEffect = None
    provider_specific_fields: NoEffect = None
    reasoning_details: NoEffect = None
    thinking_blocks: NoEffect = None


class ChatBody(SamplingBody, kw_only=True):
    """The body of `/v1/chat/completions`."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[ToolBody] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    documents: list[dict[str, Any]] | None = None
    include_reasoning: bool | None = None

    add_special_tokens: Any = None
    audio: Any = None
    chat_template: Any = None
    echo: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    separate_reasoning: Any = None
    stream_reasoning: Any = None
    web_search_options: Any = None


class CompletionBody(SamplingBody, kw_only=True):
    """The body of `/v1/completions`; `prompt` is text, token ids, or a list of either."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None

    add_special_tokens: Any = None
    suffix: Any = None


class EmbeddingBody(Body, kw_only=True):
    """The body of `/v1/embeddings`; `input` is text, token ids, or a list of either."""

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    user: str | None = None

    normalize: bool | None = None
    pooling: Literal["last", "mean"] | None = None
    priority: int | None = None
    prompt_name: str | None = None

    add_special_tokens: Any = None
    dimensions: Any = None
    truncate_prompt_tokens: Any = None


class DocumentBody(Body, kw_only=True):
    """A document to rank, in the form of an object."""

    text: str


class ScoringBody(Body, kw_only=True):
    """The common fields of reranking and scores. The second half only takes default values."""

    model: str | None = None
    instruction: str | None = None
    prompt_name: str | None = None
    max_tokens_per_doc: int | None = None
    user: str | None = None
    priority: int | None = None
    cache_salt: str | None = None

    activation: Any = None
    add_special_tokens: Any = None
    chat_template: Any = None
    encoding_format: Any = None
    mm_processor_kwargs: Any = None
    softmax: Any = None
    truncate_prompt_tokens: Any = None
    use_activation: Any = None


class RerankBody(ScoringBody, kw_only=True):
    """The body of `/v1/rerank`."""

    query: str
    documents: list[str | DocumentBody]
    top_n: int | None = None
    return_documents: bool | None = None

    max_chunks_per_doc: Any = None
    rank_fields: Any = None
    return_embeddings: Any = None


class ScoreBody(ScoringBody, kw_only=True):
    """The body of `/v1/score`: text_1 and text_2, or queries and documents."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None


class AbortBody(Body, kw_only=True):
    """The body of `/abort_request`, with SGLang's name of the id."""

    rid: str


class TokenizeBody(Body, kw_only=True):
    """The body of `/tokenize`: a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[ToolBody] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body, kw_only=True):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: list[int]
