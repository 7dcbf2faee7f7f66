"""The end of a stream of events whose replica was lost."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from headstock_openai_server.api.errors import ApiError
from headstock_ray.exchange import HttpHead

_NAME = b"event: response."
"""How the events of responses begin; those of chats and completions have no names."""
_NUMBER = re.compile(rb'"sequence_number":(\d+)')


class EventTail:
    """Follows a stream of events, so that an error can end it as the server itself would.

    is_events: whether the answer is one
    response: the response as its stream began with it; None for other streams
    """

    def __init__(self) -> None:
        self.is_events = False
        self.response: dict[str, Any] | None = None
        self.number = 0

    def read_head(self, head: HttpHead) -> None:
        """Take the head of the answer."""
        self.is_events = any(
            name.lower() == b"content-type" and value.startswith(b"text/event-stream")
            for name, value in head.headers
        )

    def read_piece(self, piece: bytes) -> None:
        """Take a piece of the body, which holds whole events."""
        if self.is_events and self.response is None and piece.startswith(_NAME):
            data = piece.partition(b"data: ")[2].partition(b"\n")[0]
            self.response = msgspec.json.decode(data)["response"]
        if self.response is not None and (numbers := _NUMBER.findall(piece)):
            # A text in an event cannot look like a number: its quotes are escaped.
            self.number = int(numbers[-1])

    def write_error(self, error: ApiError) -> bytes:
        """The events that end the stream."""
        if self.response is None:
            return b"data: " + error.body + b"\n\ndata: [DONE]\n\n"
        failed = self.response | {
            "status": "failed",
            "error": {"code": error.code, "message": error.message},
        }
        event = {
            "type": "response.failed",
            "sequence_number": self.number + 1,
            "response": failed,
        }
        return b"event: response.failed\ndata: " + msgspec.json.encode(event) + b"\n\n"
