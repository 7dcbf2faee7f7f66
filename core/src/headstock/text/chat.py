"""Conversations as prompts, through the checkpoint's own template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from headstock.text.tokenizer import Tokenizer

Message = Mapping[str, Any]
"""One turn: "role" and "content"; content is text or a list of parts {"type": "text", "text": ...}.
"""


TEMPLATE_CHARACTERS = "{}\n"
"""Characters that a template has and the name of a file has not."""


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    template: str | None = None,
    add_generation_prompt: bool = True,
) -> str:
    """The prompt that the template makes of `messages`, in which special tokens are spelled out
    already.

    `template` takes the place of the model's. Either runs in transformers' sandbox.
    raises: UsageError without a template, RequestError where the messages do not suit it,
    ModelError where it is broken or there is no tokenizer
    """
    turns, hf_tokenizer = check_messages(messages), tokenizer.hf_tokenizer
    if template is None and hf_tokenizer.chat_template is None:
        raise UsageError(
            "this model has no chat template; give it a plain prompt, --chat-template, or choose "
            "a chat model"
        )
    options = {} if template is None else {"chat_template": template}
    try:
        text = hf_tokenizer.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=add_generation_prompt, **options
        )
    except Exception as error:  # a template can divide by zero or call what is no function
        raise explain_failure(error, turns, is_given=template is not None) from error
    return str(text)


def read_template(given: str | Path, name: str = "chat_template") -> str:
    """The template that `given` is, or that the file of this name holds. Errors call it `name`.

    raises: ModelError when the file cannot be read, UsageError when it holds no template,
        RequestError for a number
    """
    if not isinstance(given, str | Path):
        raise RequestError(
            f"{name} must be text or a path, got {describe_type(given)}", parameter="chat_template"
        )
    if isinstance(given, str) and any(mark in given for mark in TEMPLATE_CHARACTERS):
        text, said = given, name
    else:
        said = f"{name} {shorten(given)}"
        try:
            text = Path(given).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise ModelError(
                f"{said}: cannot be read: {reason}; give a file, or a template with {{{{ }}}}"
            ) from error
    check_syntax(text, said)
    return text


def check_syntax(text: str, said: str) -> None:
    """Raise UsageError unless `text` is a template; `said` is how the user put it."""
    from jinja2 import TemplateSyntaxError, nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The tag by which templates mark what an assistant says; transformers knows it."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    if not text.strip():
        raise UsageError(f"{said}: the template is empty")
    try:
        ImmutableSandboxedEnvironment(extensions=[Generation, "jinja2.ext.loopcontrols"]).parse(
            text
        )
    except TemplateSyntaxError as error:
        raise UsageError(
            f"{said}: not a Jinja template: {shorten(error.message)} (line {error.lineno})"
        ) from error


def explain_failure(
    error: Exception, turns: Sequence[Message], *, is_given: bool
) -> HeadstockError:
    """What to tell the user of a template that raised: one that was given, or the model's."""
    from jinja2 import TemplateError, TemplateSyntaxError
    from jinja2.exceptions import SecurityError

    said = shorten(error).removesuffix(".")
    whose, repair = (
        ("the given", "correct it") if is_given else ("the model's", "correct the checkpoint")
    )
    if isinstance(error, TemplateSyntaxError):
        return ModelError(f"{whose} chat template is broken: {said}; {repair}")
    if isinstance(error, SecurityError):
        return ModelError(f"{whose} chat template does what none may: {said}; {repair}")
    bare = next((index for index, turn in enumerate(turns) if turn["content"] is None), None)
    if bare is not None:
        reason = (
            f"messages[{bare}] has tool_calls and no content, which {whose} chat template "
            "cannot write"
        )
        return RequestError(f"{reason}; give it a content", parameter="messages")
    if isinstance(error, TemplateError):  # also what a template itself raises about the messages
        return RequestError(
            f"the chat template refuses these messages: {shorten(error)}", parameter="messages"
        )
    return ModelError(f"{whose} chat template failed: {said}; {repair}")


def check_messages(messages: object) -> list[dict[str, Any]]:
    """A copy of the turns whose content is text.   raises: RequestError"""
    if not isinstance(messages, list | tuple) or not messages:
        wanted = "a list of one or more turns"
        got = "an empty list" if isinstance(messages, list | tuple) else describe_type(messages)
        raise RequestError(f"messages must be {wanted}, got {got}", parameter="messages")
    return [check_message(message, index) for index, message in enumerate(messages)]


def check_message(message: object, index: int) -> dict[str, Any]:
    """A copy of one turn whose content is text.   raises: RequestError"""
    if not isinstance(message, Mapping):
        raise RequestError(
            (
                f"messages[{index}] must be an object with a role and content, got "
                f"{describe_type(message)}"
            ),
            parameter="messages",
        )
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise RequestError(
            f"messages[{index}].role must be text, got {describe_type(role)}", parameter="messages"
        )
    if content is None and not message.get("tool_calls"):
        reason = f"messages[{index}] (role {shorten(role)}) has no content"
        raise RequestError(
            f"{reason}; only a message with tool_calls may lack it", parameter="messages"
        )
    return {**message, "content": join_text_parts(content, index)}


def join_text_parts(content: object, index: int) -> str | None:
    """The text of a turn's content; None (as a turn with tool calls has) stays None.

    raises: RequestError
    """
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise RequestError(
            (
                f"messages[{index}].content must be text or a list of parts, got "
                f"{describe_type(content)}"
            ),
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
