"""The bodies of `/v1/messages` and `/v1/messages/count_tokens`, as Anthropic's API has them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from headstock_openai_server.api.bodies import Body, NoEffect, list_of


class TextBlockBody(Body, kw_only=True):
    """A text."""

    type: Literal["text"]
    text: str

    cache_control: NoEffect = None
    citations: NoEffect = None


class ThinkingBlockBody(Body, kw_only=True):
    """The model's thinking in an earlier turn; its signature is not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBody(Body, kw_only=True):
    """Thinking that another server encrypted; no model here can read it, and it is left out."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBody(Body, kw_only=True):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]

    cache_control: NoEffect = None
    caller: NoEffect = None

    toolset_name: Any = None


class ToolResultBody(Body, kw_only=True):
    """The result of a call. Chat templates do not read `is_error`: the content must say it."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[dict[str, Any]], list_of(TextBlockBody)] | None = None

    cache_control: NoEffect = None
    is_error: NoEffect = None

    toolset_name: Any = None


Block = TextBlockBody | ThinkingBlockBody | RedactedThinkingBody | ToolUseBody | ToolResultBody
BLOCKS: dict[str, type[Block]] = {
    "text": TextBlockBody,
    "thinking": ThinkingBlockBody,
    "redacted_thinking": RedactedThinkingBody,
    "tool_use": ToolUseBody,
    "tool_result": ToolResultBody,
}
"""Type of a block -> its class."""


class MessageBody(Body, kw_only=True):
    """A turn: a text, or blocks."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[dict[str, Any]], list_of(*BLOCKS.values())]


class ClientTool(Body, kw_only=True):
    """A tool that the client runs; `input_schema` is the JSON schema of its input."""

    name: str
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None

    cache_control: NoEffect = None
    eager_input_streaming: NoEffect = None

    allowed_callers: Any = None
    defer_loading: Any = None
    input_examples: Any = None


class MessagesToolChoice(Body, kw_only=True):
    """Whether the model may call tools (auto), must (any), must call `name` (tool), or may not."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingOptions(Body, kw_only=True):
    """Whether the model thinks, if its chat template has a switch. Thinking comes whole, whatever
    `display` says.
    """

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None
    display: NoEffect = None


class OutputFormat(Body, kw_only=True):
    """JSON of a schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any] | bool


class OutputConfig(Body, kw_only=True):
    """The structure of the answer, and the effort, if the chat template reads it."""

    effort: str | None = None
    format: OutputFormat | None = None


class MessageMetadata(Body, kw_only=True):
    """Whose the request is."""

    user_id: str | None = None


class PromptBody(Body, kw_only=True):
    """The body of `/v1/messages/count_tokens`."""

    messages: Annotated[list[dict[str, Any]], list_of(MessageBody)]
    model: str | None = None
    system: str | Annotated[list[dict[str, Any]], list_of(TextBlockBody)] | None = None
    tools: Annotated[list[dict[str, Any]], list_of(ClientTool)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None

    cache_control: NoEffect = None
    context_management: NoEffect = None
    speed: NoEffect = None
    user_profile_id: NoEffect = None
    workspace_id: NoEffect = None

    thread: dict[str, Any] | None = None

    mcp_servers: Any = None


class MessagesBody(PromptBody, kw_only=True):
    """The body of `/v1/messages`."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: MessageMetadata | None = None

    diagnostics: NoEffect = None
    inference_geo: NoEffect = None
    service_tier: NoEffect = None

    container: Any = None
