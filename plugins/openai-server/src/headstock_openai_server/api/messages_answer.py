"""The answers of `/v1/messages`: a message with its blocks, and the events of a stream."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import field

from headstock_openai_server.api.answers import Answer

StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]
SIGNATURE = "unsigned"
"""The signature of thinking. Nothing checks it; some clients drop thinking without one."""


class TextBlock(Answer, kw_only=True, tag_field="type", tag="text"):
    """A text."""

    text: str = ""


class ThinkingBlock(Answer, kw_only=True, tag_field="type", tag="thinking"):
    """The model's thinking."""

    thinking: str = ""
    signature: str = ""


class ToolUseBlock(Answer, kw_only=True, tag_field="type", tag="tool_use"):
    """A call of a tool; its result comes back under `id`."""

    id: str
    name: str
    input: dict[str, Any] = field(default_factory=dict)


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(Answer, kw_only=True):
    """The tokens of a message. Those of the prompt are `input_tokens` and the cached ones."""

    input_tokens: int
    cache_creation_input_tokens: Literal[0] = 0
    cache_read_input_tokens: int
    output_tokens: int


class MessageAnswer(Answer, kw_only=True):
    """The answer of `/v1/messages`."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock] = field(default_factory=list)
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class PromptTokens(Answer, kw_only=True):
    """The answer of `/v1/messages/count_tokens`."""

    input_tokens: int


class MessageStart(Answer, kw_only=True, tag_field="type", tag="message_start"):
    """The message before it has any blocks."""

    message: MessageAnswer


class BlockStart(Answer, kw_only=True, tag_field="type", tag="content_block_start"):
    """A block that begins, empty."""

    index: int
    content_block: AnswerBlock


class TextAddition(Answer, kw_only=True, tag_field="type", tag="text_delta"):
    """More of a text."""

    text: str


class ThinkingAddition(Answer, kw_only=True, tag_field="type", tag="thinking_delta"):
    """More thinking."""

    thinking: str


class SignatureAddition(Answer, kw_only=True, tag_field="type", tag="signature_delta"):
    """The signature of the block's thinking."""

    signature: str = SIGNATURE


class InputAddition(Answer, kw_only=True, tag_field="type", tag="input_json_delta"):
    """More of a call's input, which is JSON as the model writes it."""

    partial_json: str


class BlockDelta(Answer, kw_only=True, tag_field="type", tag="content_block_delta"):
    """More of the last block."""

    index: int
    delta: TextAddition | ThinkingAddition | SignatureAddition | InputAddition


class BlockStop(Answer, kw_only=True, tag_field="type", tag="content_block_stop"):
    """The end of a block."""

    index: int


class MessageEnd(Answer, kw_only=True):
    """Why a message ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Answer, kw_only=True, tag_field="type", tag="message_delta"):
    """The end of a message, and its final counts."""

    delta: MessageEnd
    usage: MessageUsage


class MessageStop(Answer, kw_only=True, tag_field="type", tag="message_stop"):
    """The end of the stream."""


BlockEvent = BlockStart | BlockDelta | BlockStop
MessageEvent = MessageStart | BlockEvent | MessageDelta | MessageStop
