"""Conversations as prompts, through the checkpoint's own template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headstock.errors import HeadstockError, ModelError, RequestError, UsageError, kind, shown
from headstock.text.tokenizer import Tokenizer

Message = Mapping[str, Any]
"""One turn: "role" and "content"; content is text or a list of parts {"type": "text", "text": ...}."""


def chat_prompt(tokenizer: Tokenizer, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
    """The prompt that the template makes of `messages`, in which special tokens are spelled out already.

    The template runs in transformers' sandbox.
    raises: UsageError without a template, RequestError where the messages do not suit it, ModelError where it is broken
    """
    turns = checked_turns(messages)
    if tokenizer.whole.chat_template is None:
        raise UsageError("this model has no chat template; give it a plain prompt, or choose a chat model")
    try:
        text = tokenizer.whole.apply_chat_template(turns, tokenize=False, add_generation_prompt=add_generation_prompt)
    except Exception as error:  # a template can divide by zero or call what is no function
        raise failure(error, turns) from error
    return str(text)


def failure(error: Exception, turns: Sequence[Message]) -> HeadstockError:
    """What to tell the user of a template that raised."""
    from jinja2 import TemplateError, TemplateSyntaxError

    if isinstance(error, TemplateSyntaxError):
        return ModelError(f"the model's chat template is broken: {shown(error)}; correct the checkpoint")
    bare = next((index for index, turn in enumerate(turns) if turn["content"] is None), None)
    if bare is not None:
        reason = f"messages[{bare}] has tool_calls and no content, which the model's chat template cannot write"
        return RequestError(f"{reason}; give it a content", parameter="messages")
    if isinstance(error, TemplateError):  # also what a template itself raises about the messages
        return RequestError(f"the chat template refuses these messages: {shown(error)}", parameter="messages")
    return ModelError(f"the model's chat template failed: {shown(error)}; correct the checkpoint")


def checked_turns(messages: object) -> list[dict[str, Any]]:
    """A copy of the turns whose content is text.   raises: RequestError"""
    if not isinstance(messages, list | tuple) or not messages:
        wanted = "a list of one or more turns"
        got = "an empty list" if isinstance(messages, list | tuple) else kind(messages)
        raise RequestError(f"messages must be {wanted}, got {got}", parameter="messages")
    return [checked(message, index) for index, message in enumerate(messages)]


def checked(message: object, index: int) -> dict[str, Any]:
    """A copy of one turn whose content is text.   raises: RequestError"""
    if not isinstance(message, Mapping):
        raise RequestError(
            f"messages[{index}] must be an object with a role and content, got {kind(message)}", parameter="messages"
        )
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise RequestError(f"messages[{index}].role must be text, got {kind(role)}", parameter="messages")
    if content is None and not message.get("tool_calls"):
        reason = f"messages[{index}] (role {shown(role)}) has no content"
        raise RequestError(f"{reason}; only a message with tool_calls may lack it", parameter="messages")
    return {**message, "content": content_text(content, index)}


def content_text(content: object, index: int) -> str | None:
    """The text of a turn's content; None (as a turn with tool calls has) stays None.   raises: RequestError"""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise RequestError(
            f"messages[{index}].content must be text or a list of parts, got {kind(content)}", parameter="messages"
        )
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestError(f"messages[{index}].content may hold only parts of type text", parameter="messages")
        texts.append(part["text"])
    return "".join(texts)
