"""Conversations as prompts, through the checkpoint's own template."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from headstock.errors import (
    HeadstockError,
    ModelError,
    RequestError,
    UsageError,
    describe_type,
    shorten,
)
from headstock.text.tokenizer import Tokenizer

Message = Mapping[str, object]
"""A message: "role", "content" and whatever else the template reads. Content is text or a list of
parts {"type": "text", "text": ...}.
"""

TEMPLATE_CHARACTERS = "{}\n"
"""Characters that tell a template from the name of a file."""


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    template: str | None = None,
    add_generation_prompt: bool = True,
    template_kwargs: Mapping[str, object] | None = None,
) -> str:
    """The prompt that the template makes of `messages`, with its special tokens spelled out.

    `template` takes the place of the model's. Either runs in transformers' sandbox, and sees the
    variables in `template_kwargs`, such as `enable_thinking`.
    raises: UsageError without a template, RequestError where it does not take these messages,
        ModelError where it is broken or there is no tokenizer
    """
    checked_messages, hf_tokenizer = check_messages(messages), tokenizer.hf_tokenizer
    if template is None and hf_tokenizer.chat_template is None:
        raise UsageError(
            "this model has no chat template; give it a plain prompt, --chat-template, or choose "
            "a chat model"
        )
    variables = _check_template_kwargs(template_kwargs, hf_tokenizer.apply_chat_template)
    options = {} if template is None else {"chat_template": template}
    try:
        text = hf_tokenizer.apply_chat_template(
            checked_messages,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **options,
            **variables,
        )
    # A template is a program: it can divide by zero, or call a value that is no function.
    except Exception as error:
        raise explain_failure(error, checked_messages, is_users=template is not None) from error
    return str(text)


def _check_template_kwargs(
    values: Mapping[str, object] | None, render: Callable[..., object]
) -> Mapping[str, object]:
    """The variables, if none of them is a parameter of `render`.   raises: RequestError"""
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
    return values or {}


def read_template(template: str | Path, name: str = "chat_template") -> str:
    """`template` itself, or the text of the file of this name. Errors call it `name`.

    raises: ModelError when the file cannot be read, UsageError when it holds no template,
        RequestError for another type
    """
    if not isinstance(template, str | Path):
        raise RequestError(
            f"{name} must be text or a path, got {describe_type(template)}",
            parameter="chat_template",
        )
    if isinstance(template, str) and any(mark in template for mark in TEMPLATE_CHARACTERS):
        text, source = template, name
    else:
        source = f"{name} {shorten(template)}"
        try:
            text = Path(template).expanduser().read_text(encoding="utf-8")
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
    from jinja2 import TemplateSyntaxError, nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The tag that marks an assistant's words in templates; transformers adds it too."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    if not text.strip():
        raise UsageError(f"{source}: the template is empty")
    try:
        ImmutableSandboxedEnvironment(extensions=[Generation, "jinja2.ext.loopcontrols"]).parse(
            text
        )
    except TemplateSyntaxError as error:
        raise UsageError(
            f"{source}: not a Jinja template: {shorten(error.message)} (line {error.lineno})"
        ) from error


def explain_failure(
    error: Exception, messages: Sequence[Message], *, is_users: bool
) -> HeadstockError:
    """The error to raise for a template that raised `error`: the user's own, or the model's."""
    from jinja2 import TemplateError, TemplateSyntaxError
    from jinja2.exceptions import SecurityError

    reason = shorten(error).removesuffix(".")
    whose, repair = (
        ("the given", "correct it") if is_users else ("the model's", "correct the checkpoint")
    )
    if isinstance(error, TemplateSyntaxError):
        return ModelError(f"{whose} chat template is broken: {reason}; {repair}")
    if isinstance(error, SecurityError):
        return ModelError(
            f"{whose} chat template uses what the sandbox forbids: {reason}; {repair}"
        )
    # Before the errors that any message can cause: many templates add None to a text.
    without_content = next(
        (index for index, message in enumerate(messages) if message["content"] is None), None
    )
    if without_content is not None:
        return RequestError(
            f"messages[{without_content}] has tool_calls and no content, which {whose} chat "
            "template cannot write; give it a content",
            parameter="messages",
        )
    if isinstance(error, TemplateError):  # also what a template itself raises about the messages
        return RequestError(
            f"the chat template refuses these messages: {shorten(error)}", parameter="messages"
        )
    return ModelError(f"{whose} chat template failed: {reason}; {repair}")


def check_messages(messages: object) -> list[dict[str, object]]:
    """A copy of the messages, with text as their content.   raises: RequestError"""
    if not isinstance(messages, list | tuple) or not messages:
        got = "an empty list" if isinstance(messages, list | tuple) else describe_type(messages)
        raise RequestError(
            f"messages must be a list of one or more turns, got {got}", parameter="messages"
        )
    return [_check_message(message, index) for index, message in enumerate(messages)]


def _check_message(message: object, index: int) -> dict[str, object]:
    if not isinstance(message, Mapping):
        raise RequestError(
            f"messages[{index}] must be an object with a role and content, got "
            f"{describe_type(message)}",
            parameter="messages",
        )
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise RequestError(
            f"messages[{index}].role must be text, got {describe_type(role)}", parameter="messages"
        )
    if content is None and not message.get("tool_calls"):
        raise RequestError(
            f"messages[{index}] (role {shorten(role)}) has no content; only a message with "
            "tool_calls may lack it",
            parameter="messages",
        )
    return {**message, "content": _join_text_parts(content, index)}


def _join_text_parts(content: object, index: int) -> str | None:
    """The text of a message's content; None, as a message with tool calls has, stays None.

    raises: RequestError
    """
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise RequestError(
            f"messages[{index}].content must be text or a list of parts, got "
            f"{describe_type(content)}",
            parameter="messages",
        )
    texts = []
    for part in content:
        if (
            not isinstance(part, Mapping)
            or part.get("type") != "text"
            or not isinstance(part.get("text"), str)
        ):
            raise RequestError(
                f"messages[{index}].content may hold only parts of type text", parameter="messages"
            )
        texts.append(part["text"])
    return "".join(texts)
