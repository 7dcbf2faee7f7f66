"""Convert the body of `/v1/messages` to a chat request."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

from headstock.errors import shorten
from headstock_openai_server.api.errors import refuse
from headstock_openai_server.api.ignored import IgnoredFields
from headstock_openai_server.api.messages_body import (
    BLOCKS,
    ClientTool,
    MessageBody,
    MessagesBody,
    MessagesToolChoice,
    OutputConfig,
    PromptBody,
    RedactedThinkingBody,
    TextBlockBody,
    ThinkingBlockBody,
    ThinkingOptions,
    ToolResultBody,
    ToolUseBody,
)
from headstock_openai_server.api.schema import (
    CalledFunction,
    ChatBody,
    ChatMessage,
    ChosenFunction,
    FunctionBody,
    MessageToolCall,
    ToolBody,
    ToolChoice,
)
from headstock_openai_server.api.strict_schemas import check_strict
from headstock_openai_server.api.structured_outputs import JsonSchemaBody, ResponseFormat
from headstock_openai_server.api.validation import convert_part
from headstock_openai_server.convert.thinking import limit_thinking, switch_thinking

CHAT_NAMES = {
    "chat_template_kwargs": "thinking",
    "continue_final_message": "messages",
    "max_completion_tokens": "max_tokens",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "prompt": "messages",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "structured_outputs": "output_config.format",
    "user": "metadata.user_id",
}
"""Field of a chat -> its name in `/v1/messages`."""
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
"""Type of `tool_choice` -> that of a chat."""
TURNS = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
"""Role -> the types of blocks that its turns may have."""


def make_chat_body(
    body: PromptBody, most: int, read: Collection[str], ignored: IgnoredFields
) -> ChatBody:
    """The chat, of at most `most` messages, whose template reads the variables `read`; `ignored`
    gets fields without effect.

    raises: ApiError
    """
    if body.thread is not None:
        # By this code the tool runner of Anthropic's library knows to send whole conversations.
        raise refuse(
            "thread is not supported; nothing is stored: send the whole conversation in messages",
            "thread",
            "thread_unsupported_request",
        )
    messages = make_messages(body, most, ignored)
    choice, output = body.tool_choice, body.output_config
    # As in Anthropic's API, an answer goes on where the assistant's own turn comes last.
    continues = bool(messages) and messages[-1].role == "assistant"
    if continues and messages[-1].tool_calls:
        raise refuse(
            "messages ends with a tool_use; send its tool_result after it, or leave it out",
            "messages",
        )
    chat = ChatBody(
        n=1,
        messages=messages,
        tools=make_tools(body.tools or (), ignored) or None,
        tool_choice=make_tool_choice(choice),
        parallel_tool_calls=False if choice and choice.disable_parallel_tool_use else None,
        response_format=make_response_format(output),
        reasoning_effort=output.effort if output else None,
        chat_template_kwargs=make_thinking(body.thinking, read, ignored),
        add_generation_prompt=not continues,
        continue_final_message=continues,
    )
    if isinstance(body, MessagesBody):
        chat.stream, chat.max_completion_tokens = body.stream, body.max_tokens
        chat.temperature, chat.top_p, chat.top_k = body.temperature, body.top_p, body.top_k
        chat.stop = body.stop_sequences
        chat.user = body.metadata.user_id if body.metadata else None
    return chat


def make_thinking(
    thinking: ThinkingOptions | None, read: Collection[str], ignored: IgnoredFields
) -> dict[str, Any]:
    """The variables of the template; without the field, it decides.   raises: ApiError"""
    if thinking is None:
        return {}
    variables = switch_thinking(read, "thinking", ignored, thinks=thinking.type != "disabled")
    if thinking.budget_tokens is not None:
        where = "thinking.budget_tokens"
        variables |= limit_thinking(read, where, ignored, thinking.budget_tokens)
    return variables


def make_messages(body: PromptBody, most: int, ignored: IgnoredFields) -> list[ChatMessage]:
    """The messages of a chat.   raises: ApiError"""
    if len(body.messages) > most:
        raise refuse(
            f"messages has {len(body.messages)} entries; at most {most} are taken", "messages"
        )
    made: list[ChatMessage] = []
    if body.system:
        made.append(ChatMessage(role="system", content=join_texts(body.system, "system", ignored)))
    for index, value in enumerate(body.messages):
        where = f"messages[{index}]"
        turn = convert_part(value, MessageBody, where, ignored)
        for message in make_turn(turn, where, ignored):
            _add_message(made, message)
    return made


def make_turn(turn: MessageBody, where: str, ignored: IgnoredFields) -> list[ChatMessage]:
    """The messages of one turn: a result of a tool is a message of its own, and so is a text after
    a call.

    raises: ApiError
    """
    if isinstance(turn.content, str):
        return [ChatMessage(role=turn.role, content=turn.content)]
    made: list[ChatMessage] = []

    def extend(*, text: bool = False) -> ChatMessage:
        if not made or made[-1].role != turn.role or (text and made[-1].tool_calls):
            made.append(ChatMessage(role=turn.role))
        return made[-1]

    for index, value in enumerate(turn.content):
        place = f"{where}.content[{index}]"
        match decode_block(value, TURNS[turn.role], place, ignored):
            case TextBlockBody(text=text):
                message = extend(text=True)
                message.content = f"{message.content or ''}{text}"
            case ThinkingBlockBody(thinking=text):
                message = extend(text=True)
                message.reasoning = f"{message.reasoning or ''}{text}"
            case ToolUseBody() as use:
                function = CalledFunction(
                    # As models write JSON: a prefix of the same tokens is in the cache.
                    name=use.name,
                    arguments=json.dumps(use.input, ensure_ascii=False),
                )
                message = extend()
                message.tool_calls = [
                    *(message.tool_calls or ()),
                    MessageToolCall(id=use.id, function=function),
                ]
            case ToolResultBody() as result:
                text = join_texts(result.content or "", f"{place}.content", ignored)
                made.append(ChatMessage(role="tool", content=text, tool_call_id=result.tool_use_id))
            case RedactedThinkingBody():
                pass
    for message in made or [extend()]:
        if message.content is None and message.tool_calls is None:
            message.content = ""
    return made


def decode_block(
    value: dict[str, Any], kinds: Sequence[str], where: str, ignored: IgnoredFields
) -> object:
    """The block at `where`, of one of these types.   raises: ApiError"""
    kind = value.get("type")
    if kind not in kinds:
        raise refuse(
            f"{where}.type {shorten(kind)} is not supported here; served: {', '.join(kinds)}",
            f"{where}.type",
            "unsupported",
        )
    return convert_part(value, BLOCKS[str(kind)], where, ignored)


def join_texts(content: str | list[dict[str, Any]], where: str, ignored: IgnoredFields) -> str:
    """The text of blocks, which must be texts.   raises: ApiError"""
    if isinstance(content, str):
        return content
    blocks = [
        decode_block(each, ("text",), f"{where}[{i}]", ignored) for i, each in enumerate(content)
    ]
    return "".join(block.text for block in blocks if isinstance(block, TextBlockBody))


def _add_message(made: list[ChatMessage], message: ChatMessage) -> None:
    """Add a message; consecutive ones of a user or of the assistant are one turn.

    Some templates raise where the roles do not alternate.
    """
    last = made[-1] if made else None
    if (
        last is None
        or last.role != message.role
        or message.role not in ("user", "assistant")
        or last.tool_calls
    ):
        made.append(message)
        return
    last.content = "\n\n".join(filter(None, (str(last.content or ""), str(message.content or ""))))
    last.reasoning = last.reasoning or message.reasoning
    last.tool_calls = message.tool_calls


def make_tools(values: Sequence[dict[str, Any]], ignored: IgnoredFields) -> list[ToolBody]:
    """The tools in the form of a chat.   raises: ApiError"""
    return [make_tool(value, f"tools[{i}]", ignored) for i, value in enumerate(values)]


def make_tool(value: dict[str, Any], where: str, ignored: IgnoredFields) -> ToolBody:
    """A tool in the form of a chat.

    raises: ApiError for tools that a server would run, and for strict ones of open objects
    """
    kind = value.get("type")
    if kind not in (None, "custom"):
        raise refuse(
            f"{where}.type {shorten(kind)} is not supported; only custom is: turn the others off "
            "in the client",
            f"{where}.type",
            "unsupported",
        )
    tool = convert_part(value, ClientTool, where, ignored)
    if tool.strict:
        check_strict(tool.input_schema, f"{where}.input_schema", requires_all=False)
    function = FunctionBody(
        name=tool.name,
        description=tool.description,
        parameters=tool.input_schema,
        strict=tool.strict,
    )
    return ToolBody(type="function", function=function)


def make_tool_choice(choice: MessagesToolChoice | None) -> Any:
    """The choice in the form of a chat.   raises: ApiError"""
    if choice is None:
        return None
    if choice.type != "tool":
        return CHOICES[choice.type]
    if choice.name is None:
        raise refuse(
            "tool_choice.name is missing", "tool_choice.name", "missing_required_parameter"
        )
    return ToolChoice(function=ChosenFunction(name=choice.name))


def make_response_format(output: OutputConfig | None) -> ResponseFormat | None:
    """The structure of the answer."""
    if output is None or output.format is None:
        return None
    return ResponseFormat(
        type="json_schema", json_schema=JsonSchemaBody(schema=output.format.schema)
    )
