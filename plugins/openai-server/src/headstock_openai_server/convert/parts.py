"""The parts of an answer in the order in which the model wrote them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from headstock.outputs import CompletionOutput, ToolCall


def split_piece(piece: CompletionOutput, num_chars: int) -> Iterator[str | ToolCall]:
    """The texts and the calls of new output, in the model's order; no text is empty.

    num_chars: the length of the answer's text before this piece
    """
    text = piece.text
    for call in piece.tool_calls:
        if call.id:
            num_before = call.offset - num_chars
            if before := text[:num_before]:
                yield before
            text, num_chars = text[num_before:], call.offset
        yield call
    if text:
        yield text


def read_arguments(text: str) -> dict[str, Any] | None:
    """The arguments of a call; None if the model slipped, and they are not a JSON object."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
