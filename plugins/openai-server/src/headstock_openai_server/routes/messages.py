"""`/v1/messages` and `/v1/messages/count_tokens`: chats in the form of Anthropic's API."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.requests import Request
from starlette.responses import Response

from headstock.outputs import CompletionOutput
from headstock.requests import PromptRequest
from headstock_openai_server.api.errors import ApiError
from headstock_openai_server.api.ignored import IgnoredFields
from headstock_openai_server.api.messages_answer import (
    BlockEvent,
    MessageAnswer,
    MessageDelta,
    MessageEnd,
    MessageEvent,
    MessageStart,
    MessageStop,
    MessageUsage,
    PromptTokens,
    StopReason,
)
from headstock_openai_server.api.messages_body import MessagesBody, PromptBody
from headstock_openai_server.api.schema import ChatBody
from headstock_openai_server.convert.limits import check_limits
from headstock_openai_server.convert.messages_input import CHAT_NAMES, make_chat_body
from headstock_openai_server.convert.messages_output import BlockWriter
from headstock_openai_server.convert.sampling import client_names, make_chat_params, name_fields
from headstock_openai_server.engine.generation import Generation, Piece
from headstock_openai_server.engine.service import Service
from headstock_openai_server.http.decoding import IGNORED, read_body
from headstock_openai_server.http.event_stream import SERVER_SENT, Framing, run_for_client
from headstock_openai_server.http.middleware import RECORD
from headstock_openai_server.routes.answering import (
    ENCODER,
    Identity,
    LoggedStream,
    json_response,
    make_identity,
    wait_for_answers,
)
from headstock_openai_server.routes.chat import count_prompt_tokens, prepare_chat, read_variables

PING = b'event: ping\ndata: {"type":"ping"}\n\n'
EFFORT = CHAT_NAMES["reasoning_effort"]
FRAMING = Framing(SERVER_SENT.content_type, PING)


async def answer_message(service: Service, request: Request) -> Response:
    """Answer `/v1/messages`.   raises: ApiError, HeadstockError, ClientGoneError"""
    body = await read_body(request, MessagesBody, service.settings)
    service.check_serving()
    identity = make_identity("msg_", service.check_model(body.model))
    record = request.scope[RECORD]
    record["model"] = identity.model
    ignored = request.scope[IGNORED]
    chat = await make_chat(service, body, ignored)
    with named_for_messages(chat):
        params = make_chat_params(chat, service.default_params, service.settings.max_n)
        check_limits(params, service.settings)
        prompt_request = await prepare_chat(service, chat, params, ignored, EFFORT)
        answer = MessageInProgress(identity, prompt_request, body.max_tokens)
        if body.stream:
            generation = await service.start_generation(
                [prompt_request], streams=True, answer_id=identity.id
            )
            stream = MessageStream(answer, generation)
            return LoggedStream(generation, stream, record, FRAMING)  # type: ignore[return-value]
        return await run_for_client(request, complete_message(service, answer, record))


async def count_tokens(service: Service, request: Request) -> Response:
    """Answer `/v1/messages/count_tokens`.   raises: ApiError, HeadstockError"""
    body = await read_body(request, PromptBody, service.settings)
    service.check_serving()
    service.check_model(body.model)
    ignored = request.scope[IGNORED]
    chat = await make_chat(service, body, ignored)
    with named_for_messages(chat):
        count = await count_prompt_tokens(service, chat, ignored, EFFORT)
        return json_response(PromptTokens(input_tokens=count))


async def make_chat(service: Service, body: PromptBody, ignored: IgnoredFields) -> ChatBody:
    """The chat that a body asks for; `ignored` gets fields without effect.

    raises: ApiError, HeadstockError
    """

    def make() -> ChatBody:
        read = read_variables(service, has_tools=bool(body.tools))
        return make_chat_body(body, service.settings.max_messages, read, ignored)

    # Not on the event loop: there may be many blocks to check, and a template to parse.
    return await asyncio.to_thread(make)


@contextmanager
def named_for_messages(chat: ChatBody) -> Iterator[None]:
    """Make errors of this block name the fields of Anthropic's API."""
    names = {name: CHAT_NAMES.get(field, field) for name, field in client_names(chat).items()}
    with name_fields({**CHAT_NAMES, **names}):
        yield


async def complete_message(
    service: Service, answer: MessageInProgress, record: dict[str, object]
) -> Response:
    """The whole message.   raises: ApiError, RequestError, EngineDied"""
    generation = await wait_for_answers(service, [answer.prompt_request], record)
    (output,) = answer.prompt_request.final_output().outputs
    answer.add_piece(output)
    message = answer.begin(generation)
    end = answer.end()
    message.content = answer.writer.blocks
    message.stop_reason, message.stop_sequence = end.stop_reason, end.stop_sequence
    return json_response(message)


class MessageInProgress:
    """A message, and how it ended.

    max_tokens: as the request has it
    """

    def __init__(self, identity: Identity, prompt_request: PromptRequest, max_tokens: int) -> None:
        self.identity = identity
        self.prompt_request = prompt_request
        self.max_tokens = max_tokens
        self.writer = BlockWriter()
        self.last: CompletionOutput | None = None

    def begin(self, generation: Generation) -> MessageAnswer:
        """The message without any blocks."""
        return MessageAnswer(
            id=self.identity.id, model=self.identity.model, usage=count_usage(generation)
        )

    def add_piece(self, piece: CompletionOutput) -> list[BlockEvent]:
        """The events of new output."""
        self.last = piece
        return list(self.writer.add_piece(piece))

    def end(self) -> MessageEnd:
        """Why the message ended."""
        last = self.last
        assert last is not None, "internal error: a message that ends has output"
        # A model's own end of a turn has no text.
        stop = last.stop_reason if isinstance(last.stop_reason, str) else None
        reason: StopReason = "end_turn" if stop is None else "stop_sequence"
        if last.finish_reason == "tool_calls":
            reason = "tool_use"
        elif last.finish_reason == "length":
            is_full = self.prompt_request.max_tokens < self.max_tokens
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
        return MessageEnd(stop_reason=reason, stop_sequence=stop)


def count_usage(generation: Generation) -> MessageUsage:
    """The token counts so far; before the first token, no prompt token is known to be cached."""
    cached = generation.num_cached_tokens
    return MessageUsage(
        input_tokens=generation.num_prompt_tokens - cached,
        cache_read_input_tokens=cached,
        output_tokens=generation.num_output_tokens,
    )


class MessageStream:
    """Writes the events of a message."""

    def __init__(self, answer: MessageInProgress, generation: Generation) -> None:
        self.answer = answer
        self.generation = generation

    def open_stream(self) -> bytes:
        """The message, without any blocks."""
        return write_event(MessageStart(message=self.answer.begin(self.generation))) + PING

    def write_pieces(self, pieces: list[Piece]) -> bytes:
        """The events of new output."""
        return b"".join(
            write_event(event) for piece in pieces for event in self.answer.add_piece(piece.output)
        )

    def close_stream(self) -> bytes:
        """Why the message ended, and its final counts."""
        delta = MessageDelta(delta=self.answer.end(), usage=count_usage(self.generation))
        return write_event(delta) + write_event(MessageStop())

    def write_error(self, error: ApiError) -> bytes:
        """The error."""
        return b"event: error\ndata: " + error.messages_body + b"\n\n"


def write_event(event: MessageEvent) -> bytes:
    """A server-sent event with its name."""
    name = str(event.__struct_config__.tag)
    return b"event: " + name.encode() + b"\ndata: " + ENCODER.encode(event) + b"\n\n"
