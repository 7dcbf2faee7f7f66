"""The prompts of `headstock run`: from flags, a file or standard input, each with its place."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import evolve, field, frozen

from headstock.errors import ModelError, RequestError, UsageError, describe_type, shorten
from headstock.sampling_checks import check_priority
from headstock.sampling_params import SamplingParams
from headstock.text.conversation import CONVERSATION_OPTIONS, Conversation, make_conversation
from headstock.text.prompt import check_salt, split_prompt

PROMPT_SOURCES = "--prompt TEXT, --input FILE.jsonl, or text on standard input"
"""Where prompts come from, for error texts."""

STDIN = "-"
"""What --input names standard input by."""

EXAMPLE = '{"prompt": "Hello"}'
"""A line of JSON, for error texts."""


@frozen(kw_only=True)
class PromptInput:
    """One prompt, checked as far as that needs no model.

    It is `content`, text or token ids, or else a `conversation`. `where` is its place for errors;
    `sampling` are its own parameters.
    """

    where: str
    content: str | tuple[int, ...] = ""
    conversation: Conversation | None = None
    sampling: Mapping[str, object] = field(factory=dict)
    priority: int = 0
    cache_salt: str = ""

    @property
    def text(self) -> str:
        """What the user wrote: the prompt, or the last text of the conversation; may be empty."""
        if self.conversation is None:
            return self.content if isinstance(self.content, str) else ""
        texts = [message.get("content") for message in self.conversation.messages]
        return next((text for text in reversed(texts) if text and isinstance(text, str)), "")


@frozen
class InvalidPrompt:
    """An input that cannot be a prompt, with its place and the reason."""

    where: str
    reason: str


def read_flags(prompts: Sequence[str]) -> list[PromptInput | InvalidPrompt]:
    """The prompts given as `--prompt`."""
    return [read_text(f"--prompt {shorten(prompt) or repr('')}", prompt) for prompt in prompts]


def read_text(where: str, text: str) -> PromptInput | InvalidPrompt:
    """One prompt of plain text."""
    try:
        content, _ = split_prompt(text)
    except RequestError as error:
        return InvalidPrompt(where, str(error))
    return PromptInput(where=where, content=content)


def read_stdin() -> PromptInput | InvalidPrompt:
    """The whole of standard input as one prompt, without the line break at its end.

    raises: UsageError when it is empty, ModelError when it cannot be read as text
    """
    try:
        text = _read_stdin_bytes().decode("utf-8")
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read standard input as UTF-8 text: {shorten(error)}") from error
    # One line break, which echo adds; others are the prompt's own.
    prompt = text.removesuffix("\n").removesuffix("\r")
    if not prompt:
        raise UsageError(f"no prompt: give {PROMPT_SOURCES}")
    return read_text("standard input", prompt)


def _read_stdin_bytes() -> bytes:
    """The whole of standard input.   raises: OSError; UsageError when it is closed"""
    if sys.stdin is None:
        raise UsageError("standard input is closed; give --prompt TEXT or --input FILE.jsonl")
    return sys.stdin.buffer.read()


def read_lines(path: str) -> list[PromptInput | InvalidPrompt]:
    """The prompts of a JSON-lines file, or of standard input (`-`); empty lines are left out.

    raises: ModelError when it cannot be read, UsageError when it holds no line
    """
    name = "standard input" if path == STDIN else shorten(path)
    try:
        content = _read_stdin_bytes() if path == STDIN else Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or shorten(error)
        raise ModelError(
            f"cannot read {name}: {reason}; give --input a file of JSON lines"
        ) from error
    # Bytes are split, and decoded line by line: a line that is not UTF-8 fails alone.
    inputs = list(_parse_lines(name if path == STDIN else Path(path).name, content.split(b"\n")))
    if not inputs:
        raise UsageError(f"{name} holds no prompts; give one JSON object a line, such as {EXAMPLE}")
    return inputs


def _parse_lines(name: str, lines: Sequence[bytes]) -> Iterator[PromptInput | InvalidPrompt]:
    """The prompt of each line that is not empty; its place is the number of the line, from 1."""
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{name}:{number}"
            try:
                yield _parse_line(where, line)
            except RequestError as error:
                yield InvalidPrompt(where, str(error))


def _parse_line(where: str, line: bytes) -> PromptInput:
    """The prompt of one line.   raises: RequestError"""
    try:
        # utf-8-sig: editors of some systems begin files with a byte-order mark
        values = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"not valid JSON: {shorten(error)}") from error
    if not isinstance(values, dict):
        raise RequestError(
            f"expected a JSON object with prompt or messages, got {describe_type(values)}"
        )
    rest = dict(values)
    contents = {
        key: rest.pop(key) for key in ("prompt", "prompt_token_ids", "messages") if key in rest
    }
    if len(contents) != 1:
        raise RequestError(
            "expected one of prompt, prompt_token_ids and messages, got "
            f"{' and '.join(contents) or 'none'}"
        )
    options = {key: rest.pop(key) for key in CONVERSATION_OPTIONS if key in rest}
    priority, salt = check_priority(rest.pop("priority", 0)), rest.pop("cache_salt", None)
    # For its checks alone: a bad line is named before a model is loaded. Its values are merged
    # later, over the flags and the model's defaults.
    SamplingParams(max_tokens=None).replace(rest)
    if "messages" in contents:
        return PromptInput(
            where=where,
            conversation=make_conversation(contents["messages"], options),
            sampling=rest,
            priority=priority,
            cache_salt=check_salt(salt),
        )
    if options:
        name = next(iter(options))
        raise RequestError(f"{name} needs messages; a prompt goes through no chat template", name)
    content, salt = split_prompt({**contents, "cache_salt": salt})
    return PromptInput(
        where=where, content=content, sampling=rest, priority=priority, cache_salt=salt
    )


def read_chat_options(tools: str | None, template_kwargs: str | None) -> dict[str, Any]:
    """The options of conversations that flags give: a JSON file of tools, and a JSON object.

    raises: UsageError, ModelError when the file cannot be read
    """
    options: dict[str, Any] = {}
    if tools is not None:
        try:
            text = Path(tools).read_text("utf-8")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise ModelError(f"--tools {shorten(tools)}: cannot be read: {reason}") from error
        options["tools"] = _parse_json("--tools", text)
    if template_kwargs is not None:
        options["chat_template_kwargs"] = _parse_json("--chat-template-kwargs", template_kwargs)
    try:
        Conversation(messages=[{"role": "user", "content": ""}], **options)
    except RequestError as error:
        raise UsageError(f"--{(error.parameter or '').replace('_', '-')}: {error}") from error
    return options


def _parse_json(flag: str, text: str) -> object:
    """The value that JSON spells.   raises: UsageError"""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{flag}: not valid JSON: {shorten(error)}") from error


def as_conversation(
    prompt_input: PromptInput | InvalidPrompt, system: str | None, options: Mapping[str, Any]
) -> PromptInput | InvalidPrompt:
    """`prompt_input` as a conversation for the chat template, after the `system` message.

    `options` are those that its line does not set.
    """
    if isinstance(prompt_input, InvalidPrompt):
        return prompt_input
    conversation = prompt_input.conversation
    if conversation is None and not isinstance(prompt_input.content, str):
        return InvalidPrompt(
            prompt_input.where,
            "prompt: expected text to go through the chat template, got token ids",
        )
    if conversation is None:
        turn = {"role": "user", "content": prompt_input.content}
        conversation = Conversation(messages=[turn], **options)
    else:
        missing = {key: value for key, value in options.items() if not getattr(conversation, key)}
        conversation = evolve(conversation, **missing)
    if system is not None:
        opening = {"role": "system", "content": system}
        conversation = evolve(conversation, messages=[opening, *conversation.messages])
    return evolve(prompt_input, conversation=conversation)
