"""A server whose model thinks, says something and calls a tool, whatever it is asked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from served import Served, serve

TEMPLATE = (
    "{{ tools | tojson if tools else '' }}{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{{ m.reasoning_content }}{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ c.function | tojson }}</tool_call>{% endfor %}\n{% endfor %}"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)
TEXT = '<think>Hm.</think>I add.\n<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'


@contextlib.contextmanager
def serve_caller(folder: Path) -> Iterator[Served]:
    """The server; `folder` gets its chat template."""
    template = folder / "chat.jinja"
    template.write_text(TEMPLATE)
    with serve("--chat-template", str(template), script={"text": TEXT, "stops": True}) as served:
        yield served
