"""In which format a chat template writes calls of tools."""

from __future__ import annotations

import json
from typing import Any, Final

from headstock.errors import HeadstockError
from headstock.spi import Tool, ToolEventKind, ToolParser
from headstock.text.chat import render_chat
from headstock.text.messages import Message
from headstock.text.tokenizer import Tokenizer

SAMPLE: Final = Tool(
    name="find_weather",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "a city"},
            "days": {"type": "integer", "description": "how many"},
        },
        "required": ["city", "days"],
    },
)
ARGUMENTS: Final = {"city": "Oslo", "days": 2}
ANSWER: Final = "Answer"


def render_sample_calls(tokenizer: Tokenizer, template: str) -> list[str]:
    """What the template writes as an answer that is one call of `SAMPLE`, up to the end of the
    conversation; none where it writes no calls, or not where it writes answers.
    """
    plain = _render(tokenizer, template, {"content": ANSWER})
    answers = []
    # Some templates write null as a word, others take empty text for an answer.
    for content in (None, ""):
        call = _render(tokenizer, template, {"content": content, "tool_calls": [_make_call()]})
        start = next(
            (index for index, (a, b) in enumerate(zip(plain, call, strict=False)) if a != b), 0
        )
        if plain[start:].startswith(ANSWER):
            answers.append(call[start:])
    return answers


def _make_call() -> dict[str, Any]:
    function = {"name": SAMPLE.name, "arguments": json.dumps(ARGUMENTS)}
    return {"id": "abcdefghi", "type": "function", "function": function}


def _render(tokenizer: Tokenizer, template: str, answer: dict[str, Any]) -> str:
    """A conversation that ends with this answer; empty where the template refuses it."""
    function = {
        "name": SAMPLE.name,
        "description": "Find the weather.",
        "parameters": SAMPLE.parameters,
    }
    messages: list[Message] = [
        {"role": "user", "content": "How is the weather?"},
        {"role": "assistant", **answer},
    ]
    try:
        return render_chat(
            tokenizer,
            messages,
            template=template,
            tools=[{"type": "function", "function": function}],
            add_generation_prompt=False,
        )
    except HeadstockError:
        return ""


def is_sample_call(parser: ToolParser, answer: str) -> bool:
    """Whether `parser`, made with `SAMPLE`, reads the answer as the call that it is, from its
    first character on.
    """
    events = [*parser.feed(answer), *parser.finish()]
    while events and events[0].kind is ToolEventKind.CONTENT and not events[0].text.strip():
        del events[0]
    calls = [event.text for event in events if event.kind is ToolEventKind.CALL]
    if calls != [SAMPLE.name] or events[0].kind is not ToolEventKind.CALL:
        return False
    if not any(event.kind is ToolEventKind.END for event in events):
        return False
    arguments = "".join(event.text for event in events if event.kind is ToolEventKind.ARGUMENTS)
    try:
        return bool(json.loads(arguments) == ARGUMENTS)
    except ValueError:
        return False
