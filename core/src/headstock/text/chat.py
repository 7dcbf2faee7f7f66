"""Conversations as prompts, through the checkpoint's own template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headstock.errors import ModelError, RequestError, UsageError, kind, shown
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
    from jinja2 import TemplateError, TemplateSyntaxError

    try:
        text = tokenizer.whole.apply_chat_template(turns, tokenize=False, add_generation_prompt=add_generation_prompt)
    except TemplateSyntaxError as error:
        raise ModelError(f"the model's chat template is broken: {shown(error)}; correct the checkpoint") from error
    except TemplateError as error:  # also what a template itself raises about the messages
        raise RequestError(f"the chat template refuses these messages: {shown(error)}", parameter="messages") from error
    except Exception as error:  # a template can divide by zero or call what is no function
        raise ModelError(f"the model's chat template failed: {shown(error)}; correct the checkpoint") from error
    return str(text)


def checked_turns(messages: object) -> list[dict[str, Any]]:
    """A copy of the turns whose content is text.   raises: RequestError"""
    if not isinstance(messages, list | tuple) or not messages:
        wanted = "a list of one or more turns"
        got = "an empty list" if isinstance(messages, list | tuple) else kind(messages)
        raise RequestError(f"messages must be {wanted}, got {got}", parameter="messages")
    return [checked(message, index) for index, message in enumerate(messages)]


def checked(message: object, index: int) -> dict[str, Any]:
    """A copy of one turn whose content is text.   raises: RequestError"""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(
            f"messages[{index}] must be an object with a role and content, got {kind(message)}", parameter="messages"
        )
    return {**message, "content": content_text(message.get("content"), index)}


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
