"""The body of `/v1/responses`, and the items of its input."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from headstock_openai_server.api.bodies import Body, NoEffect, list_of
from headstock_openai_server.api.schema import EngineBody

Status = Literal["in_progress", "completed", "incomplete"]


class InputPart(Body, kw_only=True):
    """A text in a list of parts; `annotations` and `logprobs` come from earlier answers."""

    type: str
    text: str

    annotations: NoEffect = None
    cache_control: NoEffect = None
    id: NoEffect = None
    logprobs: NoEffect = None
    parsed: NoEffect = None
    prompt_cache_breakpoint: NoEffect = None


class InputMessage(Body, kw_only=True):
    """A message of any role."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[dict[str, Any]]
    type: Literal["message"] = "message"
    id: str | None = None
    status: Status | None = None
    phase: str | None = None

    cache_control: NoEffect = None


class FunctionCallInput(Body, kw_only=True):
    """A call that the model made; `arguments` is JSON in a string, as the model wrote it."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None

    namespace: str | None = None

    caller: NoEffect = None
    parsed_arguments: NoEffect = None


class FunctionOutputInput(Body, kw_only=True):
    """The return value of the client's function."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[dict[str, Any]]
    id: str | None = None
    name: str | None = None
    status: Status | None = None
    namespace: str | None = None

    caller: NoEffect = None


class ReasoningInput(Body, kw_only=True):
    """The model's reasoning; the summary is used if there is no content."""

    type: Literal["reasoning"]
    summary: list[dict[str, Any]]
    content: list[dict[str, Any]] | None = None
    id: str | None = None
    status: Status | None = None

    encrypted_content: Any = None


InputItem = InputMessage | FunctionCallInput | FunctionOutputInput | ReasoningInput
INPUT_ITEMS: dict[str, type[InputItem]] = {
    "message": InputMessage,
    "function_call": FunctionCallInput,
    "function_call_output": FunctionOutputInput,
    "reasoning": ReasoningInput,
}
"""Type of an item -> its class; messages may lack a type."""


class FunctionTool(Body, kw_only=True):
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    allowed_callers: Any = None
    defer_loading: Any = None
    output_schema: Any = None

    cache_control: NoEffect = None


class NamespaceTool(Body, kw_only=True):
    """Functions with unique names; calls of them also name the namespace."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: list[FunctionTool]


class NamedFunction(Body, kw_only=True):
    """A function's name and its namespace."""

    type: Literal["function"]
    name: str
    namespace: str | None = None


class ResponsesToolChoice(Body, kw_only=True):
    """The function that the model must call, or with type allowed_tools the `tools` that it may,
    and in `mode` whether it must.
    """

    type: str
    name: str | None = None
    namespace: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[NamedFunction] | None = None


class TextFormat(Body, kw_only=True):
    """Text, any JSON object, or JSON of a schema, which is enforced even without `strict`."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class TextOptions(Body, kw_only=True):
    """The structure of the answer's text."""

    format: TextFormat | None = None

    verbosity: NoEffect = None


class ReasoningOptions(Body, kw_only=True):
    """How much the model reasons, if its chat template supports it."""

    effort: str | None = None

    context: Any = None
    mode: Any = None

    generate_summary: NoEffect = None
    summary: NoEffect = None


class ResponsesStreamOptions(Body, kw_only=True):
    """Options of a stream."""

    include_obfuscation: Any = None


class ResponsesBody(EngineBody, kw_only=True):
    """The body of `/v1/responses`. The second half has no effect on the engine. The fields after it
    are refused unless their values match the default behaviour.
    """

    input: str | Annotated[list[dict[str, Any]], list_of(*INPUT_ITEMS.values())]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: Annotated[list[dict[str, Any]], list_of(FunctionTool, NamespaceTool)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    stream_options: ResponsesStreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    store: bool | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    client_metadata: dict[str, Any] | None = None
    max_tool_calls: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None

    access_programs: Any = None
    background: Any = None
    background_options: Any = None
    context_management: Any = None
    conversation: Any = None
    image: Any = None
    moderation: Any = None
    previous_response_id: Any = None
    prompt: Any = None
    top_logprobs: Any = None
    truncation: Any = None
