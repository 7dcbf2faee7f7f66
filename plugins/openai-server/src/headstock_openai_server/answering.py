"""What chats and completions share: the identity of an answer, its usage, the form of events."""

from __future__ import annotations

import time
from collections.abc import MutableMapping
from typing import Any
from uuid import uuid4

import msgspec
from attrs import frozen
from starlette.responses import Response

from headstock_openai_server.event_stream import EventStream, StreamFormat
from headstock_openai_server.generation import Generation
from headstock_openai_server.responses import Answer, Chunk, PromptTokensDetails, Usage
from headstock_openai_server.schema import SamplingBody

ENCODER = msgspec.json.Encoder()

RECORD = "headstock.record"
"""Where a scope has the facts of the request's line in the access log."""


@frozen
class Identity:
    """What all chunks of an answer repeat."""

    id: str
    model: str
    created: int


def make_identity(prefix: str, model: str) -> Identity:
    """An identity that no other answer has."""
    return Identity(f"{prefix}-{uuid4().hex}", model, int(time.time()))


def encode_event(chunk: Answer) -> bytes:
    """A server-sent event."""
    return b"data: " + ENCODER.encode(chunk) + b"\n\n"


class UsageReport:
    """The usage of one request, and where its stream shows it."""

    def __init__(self, generation: Generation, body: SamplingBody) -> None:
        options = body.stream_options
        self.generation = generation
        self.at_end = bool(options and options.include_usage)
        self.continuous = bool(options and options.continuous_usage_stats)
        self.drops_output = False

    def count(self) -> Usage:
        """The tokens so far."""
        generation = self.generation
        prompt = generation.num_prompt_tokens
        output = 0 if self.drops_output else generation.num_output_tokens
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=output,
            total_tokens=prompt + output,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=generation.num_cached_tokens),
        )

    def of_chunk(self) -> Usage | msgspec.UnsetType | None:
        """What an ordinary chunk says."""
        if self.continuous:
            return self.count()
        return None if self.at_end else msgspec.UNSET

    def write_last(self, identity: Identity, kind: str) -> bytes:
        """The chunk after all others, if it was asked for."""
        if not self.at_end:
            return b""
        return encode_event(
            Chunk(
                id=identity.id,
                object=kind,
                created=identity.created,
                model=identity.model,
                choices=[],
                usage=self.count(),
            )
        )


class LoggedStream(EventStream):
    """An event stream whose line in the access log has its tokens."""

    def __init__(
        self,
        generation: Generation,
        stream_format: StreamFormat,
        record: MutableMapping[str, object],
    ) -> None:
        super().__init__(generation, stream_format)
        self.record = record

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            note_generation(self.record, self.generation)


def note_generation(record: MutableMapping[str, object], generation: Generation) -> None:
    """Add a generation's counts to the facts of a line in the access log."""
    record["prompt_tokens"] = generation.num_prompt_tokens
    record["cached_tokens"] = generation.num_cached_tokens
    record["completion_tokens"] = generation.num_output_tokens
    record["finish"] = generation.finish_reasons
    firsts = [each.metrics.first_token for each in generation.prompt_requests]
    if firsts and None not in firsts:
        first = min(second for second in firsts if second is not None)
        record["ttft_ms"] = round(1000 * (first - generation.arrival), 1)


def json_response(answer: Answer) -> Response:
    """A whole answer."""
    return Response(ENCODER.encode(answer), media_type="application/json")
