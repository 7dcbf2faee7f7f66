"""What `headstock run` was asked for: prompts from flags, a file or standard input, each with where it came from."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import field, frozen

from headstock.errors import ModelError, RequestError, UsageError, shown


@frozen(kw_only=True)
class Ask:
    """One prompt as it was given: text, ids or a conversation, with sampling parameters and a priority of its own.

    `where` names its place.
    """

    where: str
    prompt: Any = None
    messages: Sequence[Any] | None = None
    sampling: Mapping[str, Any] = field(factory=dict)
    priority: int = 0
    cache_salt: str | None = None


@frozen
class Bad:
    """A line that is no prompt, and why."""

    where: str
    reason: str


def from_flags(prompts: Sequence[str]) -> list[Ask]:
    """The prompts given as `--prompt`."""
    return [Ask(where=f"--prompt {shown(prompt)}", prompt=prompt) for prompt in prompts]


def from_stdin() -> Ask:
    """The whole of standard input as one prompt, without the line break at its end.

    raises: UsageError when it is empty, ModelError when it cannot be read as text
    """
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read standard input as UTF-8 text: {shown(error)}") from error
    prompt = text.removesuffix("\n").removesuffix("\r")
    if not prompt:
        raise UsageError("no prompt: give --prompt TEXT, --input FILE.jsonl, or text on standard input")
    return Ask(where="standard input", prompt=prompt)


def from_file(path: str) -> list[Ask | Bad]:
    """What each line of a JSON-lines file asks for; empty lines ask for nothing.

    raises: ModelError when the file cannot be read, UsageError when there is nothing in it
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or shown(error)
        raise ModelError(f"cannot read {shown(path)}: {reason}; give --input a file of JSON lines") from error
    asks = list(parsed(Path(path).name, lines))
    if not asks:
        raise UsageError(f'{shown(path)} holds no prompts; give one JSON object a line, such as {{"prompt": "Hello"}}')
    return asks


def parsed(name: str, lines: Sequence[bytes]) -> Iterator[Ask | Bad]:
    """What each line asks for, with its number (from 1) as its place."""
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{name}:{number}"
            try:
                yield ask(where, line)
            except RequestError as error:
                yield Bad(where, str(error))


def ask(where: str, line: bytes) -> Ask:
    """What one line asks for.   raises: RequestError"""
    try:
        values = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"not valid JSON: {shown(error)}") from error
    if not isinstance(values, dict):
        raise RequestError("must be a JSON object with prompt or messages")
    rest = dict(values)
    given = [rest.pop(key) for key in ("prompt", "prompt_token_ids") if key in rest]
    messages = rest.pop("messages", None)
    if len(given) + ("messages" in values) != 1:
        raise RequestError("must have one of prompt, prompt_token_ids and messages")
    return Ask(
        where=where,
        prompt=given[0] if given else None,
        messages=messages,
        priority=rest.pop("priority", 0),
        cache_salt=rest.pop("cache_salt", None),
        sampling=rest,
    )
