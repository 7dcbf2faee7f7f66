"""Pieces of chat templates that tests make their own of."""

from __future__ import annotations

HERMES_CALLS = (
    "{% for call in messages[-1].tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
)
"""Writes the calls of the last message as Hermes does."""
