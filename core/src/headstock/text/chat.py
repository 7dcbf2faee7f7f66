"""Conversations as prompts, through the checkpoint's own template."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headstock.errors import (
    HeadstockError,
    ModelError,
    RequestError,
    UsageError,
    describe_type,
    shorten,
)
from headstock.text.messages import Message, check_messages, spell_for_template
from headstock.text.template_variables import find_unread, list_variables, make_environment
from headstock.text.tokenizer import Tokenizer

TEMPLATE_CHARACTERS = "{}\n"
"""Characters that tell a template from the name of a file."""


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    template: str | None = None,
    tools: Sequence[Mapping[str, object]] = (),
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    template_kwargs: Mapping[str, object] | None = None,
    documents: Sequence[Mapping[str, object]] = (),
) -> str:
    """The prompt that the template makes of `messages`, with its special tokens spelled out.

    `template` takes the place of the model's. Either runs in transformers' sandbox, and sees the
    variables in `template_kwargs`, such as `enable_thinking`. With `continue_final_message` the
    prompt ends within the last message, which the answer goes on with.
    raises: UsageError without a template, RequestError where it does not take these messages,
        ModelError if it is broken or without a tokenizer
    """
    checked_messages, hf_tokenizer = check_messages(messages), tokenizer.hf_tokenizer
    template_text = find_template(tokenizer, template, has_tools=bool(tools))
    if tools and "tools" not in template_text:
        raise RequestError(
            "the chat template does not write tools; leave tools out, or set chat_template "
            "(--chat-template) to one that does",
            parameter="tools",
        )
    read = list_variables(template_text) if documents else None
    if read is not None and "documents" not in read:
        raise RequestError(
            "the chat template does not write documents; put them into the messages, or set "
            "chat_template (--chat-template) to one that does",
            parameter="documents",
        )
    variables = _check_template_kwargs(
        template_kwargs, hf_tokenizer.apply_chat_template, template_text
    )

    def render(turns: list[dict[str, Any]]) -> str:
        return str(
            hf_tokenizer.apply_chat_template(
                turns,
                tools=list(tools) or None,
                documents=list(documents) or None,
                chat_template=template_text,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **variables,
            )
        )

    turns = [spell_for_template(message, template_text) for message in checked_messages]
    try:
        return render(turns)
    # A template is a program: it can divide by zero, or call a value that is not a function.
    except Exception as error:
        if all(turn["content"] is not None for turn in turns):
            raise explain_failure(error, is_users=template is not None) from error
    # Clients send null beside calls of tools. Some templates test for it, others add it to a text.
    try:
        return render([{**turn, "content": turn["content"] or ""} for turn in turns])
    except Exception as error:
        raise explain_failure(error, is_users=template is not None) from error


def find_template(tokenizer: Tokenizer, template: str | None, *, has_tools: bool = False) -> str:
    """The template of a chat: `template`, or else the model's own, which may have one for tools.

    raises: UsageError if it has none
    """
    hf_tokenizer = tokenizer.hf_tokenizer
    if template is None and hf_tokenizer.chat_template is None:
        raise UsageError(
            "this model has no chat template; give it a plain prompt, set chat_template "
            "(--chat-template), or choose a chat model"
        )
    if template is not None:
        return template
    try:
        return str(hf_tokenizer.get_chat_template(tools=[{}] if has_tools else None))
    except ValueError as error:  # several, and none of them is the default
        raise UsageError(f"this model's chat templates: {shorten(error)}") from error


def _check_template_kwargs(
    values: Mapping[str, object] | None, render: Callable[..., object], template: str
) -> Mapping[str, object]:
    """The variables, if none is a parameter of `render` or a slip for one that the template reads.

    raises: RequestError
    """
    # transformers passes what it does not know on to the template. What it knows would change how
    # the template is rendered, or which one.
    taken = {"conversations", "messages", "self", *inspect.signature(render).parameters}
    for name in values or ():
        if not isinstance(name, str) or name in taken:
            raise RequestError(
                f"chat_template_kwargs may not set {shorten(name)}; give it variables that the "
                "chat template reads",
                parameter="chat_template_kwargs",
            )
    find_unread(values or {}, template)
    return values or {}


def read_template(template: str | Path, name: str = "chat_template") -> str:
    """`template` itself, or the text of the file of this name. Errors call it `name`.

    raises: ModelError when the file cannot be read, UsageError when it holds no template,
        RequestError for another type
    """
    if not isinstance(template, str | Path):
        raise RequestError(
            f"{name}: expected text or a path, got {describe_type(template)}",
            parameter="chat_template",
        )
    if isinstance(template, str) and any(mark in template for mark in TEMPLATE_CHARACTERS):
        text, source = template, name
    else:
        source = f"{name} {shorten(template)}"
        try:
            text = Path(os.path.expanduser(template)).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise ModelError(
                f"{source}: cannot be read: {reason}; give a file, or a template with {{{{ }}}}"
            ) from error
    _check_syntax(text, source)
    return text


def _check_syntax(text: str, source: str) -> None:
    """Raise UsageError, which calls it `source`, unless `text` is a template."""
    # Parsed at once, not when the first chat is rendered: a wrong file is refused before a model
    # is loaded for minutes.
    from jinja2 import TemplateSyntaxError

    if not text.strip():
        raise UsageError(f"{source}: the template is empty")
    try:
        make_environment().parse(text)
    except TemplateSyntaxError as error:
        raise UsageError(
            f"{source}: not a Jinja template: {shorten(error.message)} (line {error.lineno})"
        ) from error


def explain_failure(error: Exception, *, is_users: bool) -> HeadstockError:
    """The error to raise for a template that raised `error`: the user's own, or the model's."""
    from jinja2 import TemplateError, TemplateSyntaxError
    from jinja2.exceptions import SecurityError

    reason = shorten(error).removesuffix(".")
    whose, repair = (
        ("the given", "correct it") if is_users else ("the model's", "correct the checkpoint")
    )
    if isinstance(error, ValueError) and "continue_final_message" in str(error):
        # transformers' own: it looks for the message in what the template has written.
        return RequestError(
            "continue_final_message is not possible here: the chat template changes the last "
            "message; give its reasoning in the field reasoning, or leave continue_final_message "
            "out",
            parameter="continue_final_message",
        )
    if isinstance(error, TemplateSyntaxError):
        return ModelError(f"{whose} chat template is broken: {reason}; {repair}")
    if isinstance(error, SecurityError):
        return ModelError(
            f"{whose} chat template uses what the sandbox forbids: {reason}; {repair}"
        )
    if isinstance(error, TemplateError):  # also what a template itself raises about the messages
        return RequestError(
            f"the chat template refuses these messages: {shorten(error)}", parameter="messages"
        )
    return ModelError(f"{whose} chat template failed: {reason}; {repair}")
