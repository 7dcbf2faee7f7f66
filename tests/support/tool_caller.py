"""Servers whose models call tools: one whatever it is asked, one where a grammar has it do so."""

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


CHOOSER_TEMPLATE = (
    "{{ tools | tojson if tools else '' }}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}"
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@contextlib.contextmanager
def serve_chooser(key: str) -> Iterator[Served]:
    """A server with the demo model, which grammars have call tools or follow schemas."""
    with serve("--chat-template", CHOOSER_TEMPLATE, "--num-pages", "256", key=key) as served:
        yield served
