"""`/api/chat` and `/api/generate`: chats in the form of Ollama's API."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from attrs import frozen
from starlette.requests import Request
from starlette.responses import Response

from headstock import SamplingParams
from headstock.outputs import CompletionOutput
from headstock.requests import PromptRequest
from headstock_openai_server.api.errors import ApiError
from headstock_openai_server.api.ignored import IgnoredFields
from headstock_openai_server.api.ollama_answer import (
    AnsweredOllamaMessage,
    GenerateReply,
    OllamaChatReply,
    OllamaReply,
)
from headstock_openai_server.api.ollama_body import GenerateBody, OllamaChatBody
from headstock_openai_server.api.schema import ChatBody
from headstock_openai_server.convert.limits import check_limits
from headstock_openai_server.convert.logprobs import make_chat_logprobs
from headstock_openai_server.convert.ollama_input import CHAT_NAMES, make_chat_body
from headstock_openai_server.convert.ollama_output import MessageWriter
from headstock_openai_server.convert.sampling import client_names, make_chat_params, name_fields
from headstock_openai_server.engine.generation import Generation, Piece
from headstock_openai_server.engine.service import Service
from headstock_openai_server.http.decoding import IGNORED, read_body
from headstock_openai_server.http.event_stream import Framing, run_for_client
from headstock_openai_server.http.middleware import RECORD
from headstock_openai_server.routes.answering import (
    ENCODER,
    LoggedStream,
    json_response,
    wait_for_answers,
)
from headstock_openai_server.routes.chat import prepare_chat, read_variables

# Clients parse each line, so nothing can be sent in silences.
FRAMING = Framing(b"application/x-ndjson", b"")
LATEST = ":latest"
"""The tag of a model that Ollama's clients may add."""


async def answer_ollama_chat(service: Service, request: Request) -> Response:
    """Answer `/api/chat`.   raises: ApiError, HeadstockError, ClientGoneError"""
    body = await read_body(request, OllamaChatBody, service.settings)
    names = {"messages": "messages", "prompt": "messages"}
    return await answer(service, request, body, names, has_prompt=bool(body.messages))


async def answer_generate(service: Service, request: Request) -> Response:
    """Answer `/api/generate`.   raises: ApiError, HeadstockError, ClientGoneError"""
    body = await read_body(request, GenerateBody, service.settings)
    names = {"messages": "prompt", "prompt": "prompt", "prompts": "prompt"}
    return await answer(service, request, body, names, has_prompt=bool(body.prompt))


async def answer(
    service: Service,
    request: Request,
    body: OllamaChatBody | GenerateBody,
    names: Mapping[str, str],
    *,
    has_prompt: bool,
) -> Response:
    """Answer a body; `names` maps a chat's fields to the client's."""
    service.check_serving()
    record = request.scope[RECORD]
    record["model"] = find_model(service, body.model)
    writer = ReplyWriter(body.model, isinstance(body, OllamaChatBody))
    if not has_prompt:
        return json_response(writer.write(AnsweredOllamaMessage(), done=True, done_reason="load"))
    ignored = request.scope[IGNORED]

    def make() -> ChatBody:
        has_tools = isinstance(body, OllamaChatBody) and bool(body.tools)
        return make_chat_body(body, read_variables(service, has_tools=has_tools), ignored)

    # Not on the event loop: there may be many messages, and a template to parse.
    chat = await asyncio.to_thread(make)
    with named_for_ollama(chat, names):
        params = make_chat_params(
            chat, service.default_params, service.settings.max_n, service.max_tokens
        )
        check_limits(params, service.settings)
        prompt_request = await prepare(service, body, chat, params, ignored)
        answering = Answering(writer, MessageWriter(), params.logprobs)
        if chat.stream:
            generation = await service.start_generation([prompt_request], streams=True)
            stream = ReplyStream(answering, generation)
            return LoggedStream(generation, stream, record, FRAMING)  # type: ignore[return-value]
        whole = complete(service, answering, prompt_request, record)
        return await run_for_client(request, whole)


def find_model(service: Service, name: str) -> str:
    """The served name of a model, which may lack the tag.   raises: ApiError (404)"""
    is_served = name in service.settings.model_names
    return service.check_model(name if is_served else name.removesuffix(LATEST))


@contextmanager
def named_for_ollama(chat: ChatBody, names: Mapping[str, str]) -> Iterator[None]:
    """Make errors of this block name the fields of Ollama's API."""
    fields = {**CHAT_NAMES, **names}
    with name_fields(fields | {name: fields.get(f, f) for name, f in client_names(chat).items()}):
        yield


async def prepare(
    service: Service,
    body: OllamaChatBody | GenerateBody,
    chat: ChatBody,
    params: SamplingParams,
    ignored: IgnoredFields,
) -> PromptRequest:
    """The checked request.   raises: ApiError, RequestError, ModelError"""
    if not (isinstance(body, GenerateBody) and body.raw):
        return await prepare_chat(service, chat, params, ignored, CHAT_NAMES["reasoning_effort"])
    return await asyncio.to_thread(
        service.session.input_processor.process, body.prompt or "", params
    )


async def complete(
    service: Service,
    answering: Answering,
    prompt_request: PromptRequest,
    record: dict[str, object],
) -> Response:
    """The whole answer.   raises: ApiError, RequestError, EngineDied"""
    generation = await wait_for_answers(service, [prompt_request], record)
    (output,) = prompt_request.final_output().outputs
    message = answering.messages.add_piece(output) or AnsweredOllamaMessage()
    fields = answering.list_logprobs(output) | describe_end(output, generation)
    return json_response(answering.replies.write(message, **fields))


@frozen
class ReplyWriter:
    """Writes the answers of one of the two routes."""

    model: str
    is_chat: bool

    def write(self, message: AnsweredOllamaMessage, **fields: Any) -> OllamaReply:
        """The answer with this message, or addition to one."""
        fields |= {"model": self.model, "created_at": write_time(datetime.now(UTC))}
        if self.is_chat:
            return OllamaChatReply(message=message, **fields)
        return GenerateReply(response=message.content, thinking=message.thinking, **fields)


@frozen
class Answering:
    """An answer in progress.

    num_alternatives: likeliest tokens of each position; None without log-probabilities
    """

    replies: ReplyWriter
    messages: MessageWriter
    num_alternatives: int | None

    def list_logprobs(self, output: CompletionOutput) -> dict[str, Any]:
        """The field of the log-probabilities, if requested."""
        if self.num_alternatives is None or not output.logprobs:
            return {}
        made = make_chat_logprobs(output.token_ids, output.logprobs, self.num_alternatives)
        return {"logprobs": made.content}


class ReplyStream:
    """Writes the lines of an answer."""

    def __init__(self, answering: Answering, generation: Generation) -> None:
        self.answering = answering
        self.generation = generation
        self.last: CompletionOutput | None = None

    def open_stream(self) -> bytes:
        """Nothing."""
        return b""

    def write_pieces(self, pieces: list[Piece]) -> bytes:
        """A line for new output."""
        return b"".join(self._write_piece(piece.output) for piece in pieces)

    def _write_piece(self, output: CompletionOutput) -> bytes:
        self.last = output
        message = self.answering.messages.add_piece(output)
        logprobs = self.answering.list_logprobs(output)
        if message is None and not logprobs:
            return b""
        reply = self.answering.replies.write(message or AnsweredOllamaMessage(), **logprobs)
        return ENCODER.encode(reply) + b"\n"

    def close_stream(self) -> bytes:
        """The line with the counts."""
        assert self.last is not None, "internal error: an answer that ends has output"
        end = describe_end(self.last, self.generation)
        return ENCODER.encode(self.answering.replies.write(AnsweredOllamaMessage(), **end)) + b"\n"

    def write_error(self, error: ApiError) -> bytes:
        """The error."""
        return error.ollama_body + b"\n"


def describe_end(output: CompletionOutput, generation: Generation) -> dict[str, Any]:
    """The fields of the last line: why the answer ended, counts, and times in nanoseconds."""
    (prompt_request,) = generation.prompt_requests
    (progress,) = generation.progress.values()
    queued = prompt_request.metrics.queue_seconds or 0.0
    seconds = {
        "total_duration": progress.last - generation.arrival,
        "prompt_eval_duration": max(0.0, progress.first - generation.arrival - queued),
        "eval_duration": progress.last - progress.first,
    }
    return {
        "done": True,
        "done_reason": "length" if output.finish_reason == "length" else "stop",
        "load_duration": 0,
        "prompt_eval_count": generation.num_prompt_tokens,
        "eval_count": generation.num_output_tokens,
        **{name: round(1e9 * each) for name, each in seconds.items()},
    }


def write_time(time: datetime) -> str:
    """The time as Go writes it."""
    return time.isoformat().replace("+00:00", "Z")
