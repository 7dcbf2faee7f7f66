"""The form of a message's content that a chat template reads: a text, or a list of parts."""

from __future__ import annotations

from functools import lru_cache

from headstock.text.template_variables import make_environment

MARK = "\ue000"
"""A text that no template writes by itself."""


# Each chat asks, and a large template takes 20 ms to parse.
@lru_cache(maxsize=8)
def takes_parts(template: str) -> bool:
    """Whether the template writes texts that come as parts alone, as templates of models that take
    images do. Such a template leaves a plain text out.
    """
    parts = [{"type": "text", "text": MARK}]
    return not _writes(template, MARK) and _writes(template, parts)


def _writes(template: str, content: object) -> bool:
    """Whether the mark is in what the template makes of a user's message with this content."""
    messages = [{"role": "user", "content": content}]
    try:
        text = make_environment().from_string(template).render(messages=messages)
    # Rendering says what is wrong with it: a template is a program, and may need what is not here.
    except Exception:
        return False
    return MARK in text
