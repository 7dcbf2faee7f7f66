"""A conversation as HTTP, the command line and Python alike give it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from attrs import field, frozen

from headstock.errors import RequestError, describe_type, find_nearest_name, shorten
from headstock.spi import Tool
from headstock.text.chat import read_template
from headstock.text.messages import Message, check_messages
from headstock.text.tools import check_tools, list_forced_tools, list_offered_tools


def _check_documents(values: object) -> tuple[Mapping[str, object], ...]:
    """The documents; none for None.   raises: RequestError"""
    if values is None:
        return ()
    if not isinstance(values, list | tuple):
        raise RequestError(
            f"documents: expected a list of objects, got {describe_type(values)}", "documents"
        )
    for index, each in enumerate(values):
        if not isinstance(each, Mapping):
            raise RequestError(
                f"documents[{index}]: expected an object, got {describe_type(each)}", "documents"
            )
    return tuple(values)


@frozen(kw_only=True)
class Conversation:
    """Messages, and how the chat template writes them; the names are those of OpenAI and vLLM.

    Checked as far as that needs no model.
    raises: RequestError, which names the field
    """

    messages: Sequence[Message] = field(converter=check_messages)
    tools: tuple[Mapping[str, object], ...] = field(default=(), converter=check_tools)
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, object] | None = None
    reasoning_effort: str | None = None
    documents: tuple[Mapping[str, object], ...] = field(default=(), converter=_check_documents)
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def __attrs_post_init__(self) -> None:
        for name, kinds, wanted in (
            ("parallel_tool_calls", (bool, type(None)), "true or false"),
            ("chat_template", (str, type(None)), "a Jinja template"),
            ("chat_template_kwargs", (Mapping, type(None)), "an object"),
            ("reasoning_effort", (str, type(None)), "text"),
            ("add_generation_prompt", (bool,), "true or false"),
            ("continue_final_message", (bool,), "true or false"),
        ):
            value = getattr(self, name)
            if not isinstance(value, kinds):
                raise RequestError(f"{name}: expected {wanted}, got {describe_type(value)}", name)
        list_forced_tools(self.tool_choice, self.tools)
        if self.add_generation_prompt and self.continue_final_message:
            raise RequestError(
                "continue_final_message needs add_generation_prompt false: the last message goes "
                "on, and no other begins",
                "continue_final_message",
            )
        if self.continue_final_message and self.messages[-1].get("tool_calls"):
            raise RequestError(
                "continue_final_message needs a last message that ends with text: this one ends "
                "with tool_calls; leave them out",
                "continue_final_message",
            )

    @property
    def forced_tools(self) -> list[Tool]:
        """The tools of which the model must call one; empty if it decides itself."""
        return list_forced_tools(self.tool_choice, self.tools)

    @property
    def offered_tools(self) -> tuple[Mapping[str, object], ...]:
        """The tools that the model may call: none with tool_choice none."""
        return list_offered_tools(self.tool_choice, self.tools)

    @property
    def begun_text(self) -> str:
        """The content of the message that the answer continues; empty where it begins anew."""
        return str(self.messages[-1]["content"]) if self.continue_final_message else ""


class ChatOptions(TypedDict, total=False):
    """The fields of a conversation beside its messages, as keywords.

    chat_template: a Jinja template, or the name of a file with one
    documents: objects that the template writes, such as {"title": ..., "text": ...}
    """

    tools: Sequence[Mapping[str, object]] | None
    tool_choice: str | Mapping[str, object] | None
    parallel_tool_calls: bool | None
    chat_template: str | Path | None
    chat_template_kwargs: Mapping[str, object] | None
    reasoning_effort: str | None
    documents: Sequence[Mapping[str, object]] | None
    add_generation_prompt: bool
    continue_final_message: bool


def make_conversation(messages: Sequence[Message], options: Mapping[str, Any]) -> Conversation:
    """The conversation, with a template read from its file.

    raises: RequestError, for an unknown option with a suggestion; ModelError, UsageError
    """
    for name in options:
        if name not in CONVERSATION_OPTIONS:
            near = find_nearest_name(name, CONVERSATION_OPTIONS)
            raise RequestError(
                f"no option of a chat is called {shorten(name)}; "
                + (
                    f"did you mean {near}?"
                    if near
                    else f"known are {', '.join(CONVERSATION_OPTIONS)}"
                ),
                shorten(name),
            )
    template = options.get("chat_template")
    if template is not None:
        options = {**options, "chat_template": read_template(template)}
    return Conversation(messages=messages, **options)


CONVERSATION_OPTIONS: tuple[str, ...] = tuple(ChatOptions.__annotations__)
"""The names of the options."""
