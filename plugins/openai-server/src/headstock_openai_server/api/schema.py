"""The bodies of requests. Fields that nothing serves are refused by name, but for those that ask
for nothing of an answer.

Names are OpenAI's, and vLLM's for what OpenAI lacks. `null` is as good as leaving a field out.
"""

from __future__ import annotations

from typing import Any, Literal

from headstock_openai_server.api.bodies import Body
from headstock_openai_server.api.structured_outputs import ResponseFormat, StructuredOutputsBody


class StreamOptions(Body, kw_only=True):
    """The additional reports of a stream."""

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


class SamplingBody(EngineBody, kw_only=True):
    """What completions and chats share. The second half is refused unless it changes nothing."""

    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    prompt_logprobs: int | None = None
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
    request_id: Any = None
    return_hidden_states: Any = None
    return_token_ids: Any = None
    return_tokens_as_token_ids: Any = None
    spaces_between_special_tokens: Any = None
    truncate_prompt_tokens: Any = None
    use_beam_search: Any = None


class CalledFunction(Body, kw_only=True):
    """A function that a message calls; `arguments` is JSON in a string, as the model wrote it."""

    name: str
    arguments: str


class MessageToolCall(Body, kw_only=True):
    """A call of a tool in an assistant's message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class FunctionBody(Body, kw_only=True):
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(Body, kw_only=True):
    """A tool that a request offers."""

    type: Literal["function"]
    function: FunctionBody


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


class ChatMessage(Body, kw_only=True):
    """One message of a conversation."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None

    annotations: Any = None
    audio: Any = None
    function_call: Any = None
    refusal: Any = None


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
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    add_special_tokens: Any = None
    audio: Any = None
    chat_template: Any = None
    documents: Any = None
    echo: Any = None
    function_call: Any = None
    functions: Any = None
    include_reasoning: Any = None
    metadata: Any = None
    modalities: Any = None
    prediction: Any = None
    separate_reasoning: Any = None
    service_tier: Any = None
    store: Any = None
    stream_reasoning: Any = None
    verbosity: Any = None
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

    add_special_tokens: Any = None
    dimensions: Any = None
    truncate_prompt_tokens: Any = None


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
