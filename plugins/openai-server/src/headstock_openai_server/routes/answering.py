"""Shared parts of the routes that generate text: an answer's identity, its usage, its access log
line, and the chunks of chats and completions.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import MutableMapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import msgspec
from attrs import frozen
from starlette.responses import Response

from headstock_openai_server.api.answers import (
    Answer,
    Chunk,
    PromptLogprobs,
    PromptTokensDetails,
    Timings,
    Usage,
)
from headstock_openai_server.api.errors import ApiError
from headstock_openai_server.api.schema import SamplingBody
from headstock_openai_server.convert.logprobs import make_prompt_logprobs
from headstock_openai_server.engine.generation import Generation, Piece
from headstock_openai_server.http.event_stream import (
    SERVER_SENT,
    EventStream,
    Framing,
    StreamFormat,
)

if TYPE_CHECKING:
    from headstock.requests import PromptRequest
    from headstock_openai_server.engine.service import Service

ENCODER = msgspec.json.Encoder()
DONE = b"data: [DONE]\n\n"
PLACEHOLDER = "\ue000"
"""The placeholder text of the template for text-only chunks."""


@frozen
class Identity:
    """The common fields of all chunks of an answer."""

    id: str
    model: str
    created: int


def make_identity(prefix: str, model: str) -> Identity:
    """A unique identity; its id begins with `prefix`."""
    return Identity(f"{prefix}{uuid4().hex}", model, int(time.time()))


def encode_event(chunk: Answer) -> bytes:
    """A server-sent event."""
    return b"data: " + ENCODER.encode(chunk) + b"\n\n"


class UsageReport:
    """The usage and the times of one request, and in which chunks they appear."""

    def __init__(self, generation: Generation, body: SamplingBody) -> None:
        options = body.stream_options
        self.generation = generation
        self.at_end = bool(options and options.include_usage)
        self.times_at_end = bool(options and options.include_timings)
        self.continuous = bool(options and options.continuous_usage_stats)

    def count(self) -> Usage:
        """The token counts so far."""
        generation = self.generation
        prompt = generation.num_prompt_tokens
        output = generation.num_output_tokens
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=output,
            total_tokens=prompt + output,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=generation.num_cached_tokens),
        )

    def measure(self) -> Timings:
        """The times so far: to the first token of any answer, and to the last of all."""
        generation = self.generation
        progress = generation.progress.values()
        if not progress:
            return Timings(ttft=None, total=None, tokens_per_second=None)
        first = min(each.first for each in progress) - generation.arrival
        total = max(each.last for each in progress) - generation.arrival
        rate = generation.num_output_tokens / total if total else None
        return Timings(ttft=first, total=total, tokens_per_second=rate)

    def of_chunk(self) -> Usage | msgspec.UnsetType | None:
        """The usage and times of an ordinary chunk."""
        if self.continuous:
            return self.count()
        return None if self.at_end else msgspec.UNSET

    def write_last(self, identity: Identity, kind: str) -> bytes:
        """The final chunk with the usage, if requested."""
        if not (self.at_end or self.times_at_end):
            return b""
        return encode_event(
            Chunk(
                id=identity.id,
                object=kind,
                created=identity.created,
                model=identity.model,
                choices=[],
                usage=self.count() if self.at_end else msgspec.UNSET,
                timings=self.measure() if self.times_at_end else msgspec.UNSET,
            )
        )


class ChunkStream(ABC):
    """Writes the chunks of chats or completions, with their identity and the requested usage."""

    def __init__(self, identity: Identity, usage: UsageReport, kind: str) -> None:
        self.usage = usage
        self.identity = identity
        self.kind = kind
        self.make_chunk = partial(
            Chunk, id=identity.id, object=kind, created=identity.created, model=identity.model
        )
        self.text_frames: dict[int, tuple[bytes, bytes]] = {}

    def open_stream(self) -> bytes:
        """No events, unless overridden."""
        return b""

    def write_pieces(self, pieces: list[Piece]) -> bytes:
        """A chunk for each answer with new output, and another at its end."""
        return b"".join(map(self.write_piece, pieces))

    @abstractmethod
    def write_piece(self, piece: Piece) -> bytes:
        """The chunks of one answer's new output."""

    def close_stream(self) -> bytes:
        """The usage, if requested, and `[DONE]`."""
        return self.usage.write_last(self.identity, self.kind) + DONE

    def write_error(self, error: ApiError) -> bytes:
        """The error and `[DONE]`."""
        return b"data: " + error.body + b"\n\n" + DONE

    @abstractmethod
    def make_text_choice(self, index: int, text: str) -> Answer:
        """A text-only addition to one answer."""

    def write_choice(
        self, choice: Answer, prompt_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    ) -> bytes:
        """A chunk of one answer."""
        usage = self.usage.of_chunk()
        chunk = self.make_chunk(choices=[choice], usage=usage, prompt_token_ids=prompt_ids)
        return encode_event(chunk)

    def write_text(self, index: int, text: str) -> bytes:
        """A text-only chunk, like most."""
        if self.usage.continuous:
            return self.write_choice(self.make_text_choice(index, text))
        # Such chunks only differ in their text; encoding a new one costs three times as much.
        frame = self.text_frames.get(index)
        if frame is None:
            sample = self.write_choice(self.make_text_choice(index, PLACEHOLDER))
            # From the right: the model's name, which comes earlier, may contain anything.
            before, _, after = sample.rpartition(ENCODER.encode(PLACEHOLDER))
            frame = self.text_frames[index] = before, after
        return frame[0] + ENCODER.encode(text) + frame[1]


async def wait_for_answers(
    service: Service,
    prompt_requests: Sequence[PromptRequest],
    record: MutableMapping[str, object],
    *,
    counts_output: bool = True,
) -> Generation:
    """Run requests to their ends, and return the closed generation.

    raises: ApiError, RequestError, EngineDied
    """
    async with service.open_generation(
        prompt_requests, streams=False, counts_output=counts_output
    ) as generation:
        try:
            await generation.collect()
        finally:
            note_generation(record, generation)
        return generation


class LoggedStream(EventStream):
    """An event stream whose access log line has its token counts."""

    def __init__(
        self,
        generation: Generation,
        stream_format: StreamFormat,
        record: MutableMapping[str, object],
        framing: Framing = SERVER_SENT,
    ) -> None:
        super().__init__(generation, stream_format, framing)
        self.record = record

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            note_generation(self.record, self.generation)


def note_generation(record: MutableMapping[str, object], generation: Generation) -> None:
    """Add a generation's counts to its access log line."""
    record["prompt_tokens"] = generation.num_prompt_tokens
    record["cached_tokens"] = generation.num_cached_tokens
    record["completion_tokens"] = generation.num_output_tokens
    record["finish"] = generation.finish_reasons
    firsts = [each.metrics.first_token for each in generation.prompt_requests]
    if firsts and None not in firsts:
        first = min(second for second in firsts if second is not None)
        record["ttft_ms"] = round(1000 * (first - generation.arrival), 1)
        queued = max(each.metrics.queue_seconds or 0.0 for each in generation.prompt_requests)
        record["queue_ms"] = round(1000 * queued, 1)


def write_prompt_logprobs(
    prompt_request: PromptRequest, body: SamplingBody
) -> PromptLogprobs | msgspec.UnsetType:
    """The log-probabilities of the prompt, if requested."""
    if body.prompt_logprobs is None:
        return msgspec.UNSET
    tables = prompt_request.prompt_logprobs or ()
    return make_prompt_logprobs(prompt_request.prompt.tokens, tables, body.prompt_logprobs)


def json_response(answer: Answer) -> Response:
    """A whole answer."""
    return Response(ENCODER.encode(answer), media_type="application/json")
