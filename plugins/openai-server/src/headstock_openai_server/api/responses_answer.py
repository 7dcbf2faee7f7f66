"""The answers of `/v1/responses`: a response with its items, and the events of a stream."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, UnsetType, field

from headstock_openai_server.api.answers import Answer

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(Answer, kw_only=True):
    """The text of a message."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)


class ReasoningText(Answer, kw_only=True):
    """The text of a reasoning item."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class OutputMessage(Answer, kw_only=True, tag_field="type", tag="message"):
    """A message; empty while it is being generated."""

    id: str
    status: Status = "in_progress"
    role: Literal["assistant"] = "assistant"
    content: list[OutputText] = field(default_factory=list)


class ReasoningItem(Answer, kw_only=True, tag_field="type", tag="reasoning"):
    """The complete reasoning before the answer; nothing is summarized."""

    id: str
    status: Status = "in_progress"
    summary: list[Any] = field(default_factory=list)
    content: list[ReasoningText] = field(default_factory=list)


class FunctionCallItem(Answer, kw_only=True, tag_field="type", tag="function_call"):
    """A call of a function; its output comes back under `call_id`."""

    id: str
    status: Status = "in_progress"
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str = ""


OutputItem = ReasoningItem | OutputMessage | FunctionCallItem


class InputTokensDetails(Answer, kw_only=True):
    """The prompt tokens that came from the prefix cache."""

    cached_tokens: int


class OutputTokensDetails(Answer, kw_only=True):
    """The reasoning tokens of the answer, including the marks around them."""

    reasoning_tokens: int


class ResponseUsage(Answer, kw_only=True):
    """The tokens of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class InputTokens(Answer, kw_only=True):
    """The answer of `/v1/responses/input_tokens`."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class IncompleteDetails(Answer, kw_only=True):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseError(Answer, kw_only=True):
    """Why a response failed."""

    code: str
    message: str


class ResponseObject(Answer, kw_only=True):
    """The answer of `/v1/responses`: the request's fields and the items of the output.

    Nothing is stored, whatever `store` was.
    """

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status = "in_progress"
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = field(default_factory=list)
    parallel_tool_calls: bool
    previous_response_id: None = None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool = False
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: Literal[0] = 0
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None


class ResponseEvent(Answer, kw_only=True):
    """An event of a stream; sequence numbers count from 0 without gaps."""

    type: str
    sequence_number: int


class LifecycleEvent(ResponseEvent, kw_only=True):
    """`response.created`, `.in_progress`, `.completed`, `.incomplete` or `.failed`."""

    response: ResponseObject


class ItemEvent(ResponseEvent, kw_only=True):
    """`response.output_item.added` or `.done`."""

    output_index: int
    item: OutputItem


class PartEvent(ResponseEvent, kw_only=True):
    """`response.content_part.added` or `.done`."""

    item_id: str
    output_index: int
    content_index: Literal[0] = 0
    part: OutputText | ReasoningText


class ContentDelta(ResponseEvent, kw_only=True):
    """`response.reasoning_text.delta`."""

    item_id: str
    output_index: int
    content_index: Literal[0] = 0
    delta: str


class ContentDone(ResponseEvent, kw_only=True):
    """`response.reasoning_text.done`."""

    item_id: str
    output_index: int
    content_index: Literal[0] = 0
    text: str


class TextDelta(ContentDelta, kw_only=True):
    """`response.output_text.delta`."""

    logprobs: list[Any] = field(default_factory=list)


class TextDone(ContentDone, kw_only=True):
    """`response.output_text.done`."""

    logprobs: list[Any] = field(default_factory=list)


class ArgumentsDelta(ResponseEvent, kw_only=True):
    """`response.function_call_arguments.delta`."""

    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(ResponseEvent, kw_only=True):
    """`response.function_call_arguments.done`."""

    item_id: str
    output_index: int
    name: str
    arguments: str
