"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headstock import SamplingParams
from headstock.requests import PromptRequest
from headstock_openai_server.answering import (
    RECORD,
    Identity,
    LoggedStream,
    UsageReport,
    encode_event,
    json_response,
    make_identity,
    note_generation,
)
from headstock_openai_server.api_errors import refuse
from headstock_openai_server.decoding import read_body
from headstock_openai_server.event_stream import run_for_client
from headstock_openai_server.generation import Piece
from headstock_openai_server.logprobs import make_chat_logprobs
from headstock_openai_server.responses import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    Chunk,
    ChunkChoice,
    Delta,
    LastChunkChoice,
)
from headstock_openai_server.sampling import make_chat_params, named_for_client
from headstock_openai_server.schema import ChatBody, ChatMessage
from headstock_openai_server.service import Service

CHUNK = "chat.completion.chunk"
ROLES = ("system", "developer", "user", "assistant")


async def answer_chat(service: Service, request: Request) -> Response:
    """Answer `/v1/chat/completions`.   raises: ApiError, HeadstockError, ClientGoneError"""
    body = await read_body(request, ChatBody, service.settings.max_body_bytes)
    service.check_serving()
    identity = make_identity("chatcmpl", service.check_model(body.model))
    record = request.scope[RECORD]
    record["model"] = identity.model
    with named_for_client(body):
        params = make_chat_params(
            body, service.default_params, service.settings.max_n, service.max_tokens
        )
        prompt_request = await prepare_chat(service, body, params)
        if body.stream:
            generation = await service.start_generation([prompt_request], streams=True)
            usage = UsageReport(generation, body)
            return LoggedStream(generation, ChatStream(identity, params, usage), record)  # type: ignore[return-value]
        whole = complete_chat(service, identity, prompt_request, body, record)
        return await run_for_client(request, whole)


async def prepare_chat(service: Service, body: ChatBody, params: SamplingParams) -> PromptRequest:
    """The checked request for a conversation.   raises: ApiError, RequestError, ModelError"""
    messages = make_messages(body.messages, service.settings.max_messages)
    processor = service.session.input_processor

    def process() -> PromptRequest:
        prompt = processor.render_chat(
            messages,
            add_generation_prompt=body.add_generation_prompt is not False,
            template_kwargs=body.chat_template_kwargs,
        )
        if body.cache_salt is not None:
            # Through the form that checks the salt; the ids are checked again with the rest.
            salted: Any = {"prompt_token_ids": prompt.tokens, "cache_salt": body.cache_salt}
            return processor.process(salted, params, body.priority or 0)
        return processor.process(prompt, params, body.priority or 0)

    return await service.run_limited(process)


def make_messages(messages: Sequence[ChatMessage], most: int) -> list[dict[str, Any]]:
    """The messages as chat templates read them.   raises: ApiError"""
    if len(messages) > most:
        raise refuse(f"messages has {len(messages)} entries; at most {most} are taken", "messages")
    return [_make_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _make_message(message: ChatMessage, where: str) -> dict[str, Any]:
    if message.role not in ROLES:
        raise refuse(
            f"{where}.role {message.role[:64]!r} is not supported; served: {', '.join(ROLES)}",
            f"{where}.role",
        )
    for index, part in enumerate(message.content if isinstance(message.content, list) else ()):
        kind = part.get("type")
        if kind != "text":
            shown = kind[:64] if isinstance(kind, str) else kind
            raise refuse(
                f"{where}.content[{index}].type {shown!r} is not supported; only text is",
                f"{where}.content[{index}].type",
            )
        for name in part.keys() - {"type", "text"}:
            raise refuse(
                f"{where}.content[{index}].{name[:64]} is not supported; leave it out",
                f"{where}.content[{index}].{name[:64]}",
            )
    # OpenAI's newer name for the same; most templates leave out a role that they do not know.
    role = "system" if message.role == "developer" else message.role
    rendered: dict[str, Any] = {"role": role, "content": message.content}
    if message.name is not None:
        rendered["name"] = message.name
    reasoning = message.reasoning_content or message.reasoning
    if reasoning is not None:
        rendered["reasoning_content"] = reasoning
    return rendered


async def complete_chat(
    service: Service,
    identity: Identity,
    prompt_request: PromptRequest,
    body: ChatBody,
    record: dict[str, object],
) -> Response:
    """The whole answer.   raises: ApiError, RequestError, EngineDied"""
    async with service.open_generation([prompt_request], streams=False) as generation:
        try:
            await generation.collect()
        finally:
            note_generation(record, generation)
        output = prompt_request.final_output()
        params = prompt_request.params
        choices = [
            ChatChoice(
                index=each.index,
                message=AssistantMessage(content=each.text),
                logprobs=None
                if each.logprobs is None
                else make_chat_logprobs(each.token_ids, each.logprobs, params.logprobs or 0),
                finish_reason=each.finish_reason or "stop",
                stop_reason=each.stop_reason,
            )
            for each in output.outputs
        ]
        return json_response(
            ChatCompletion(
                id=identity.id,
                created=identity.created,
                model=identity.model,
                choices=choices,
                usage=UsageReport(generation, body).count(),
            )
        )


class ChatStream:
    """Writes the chunks of a chat: the role, the text, and an empty delta with the reason."""

    def __init__(self, identity: Identity, params: SamplingParams, usage: UsageReport) -> None:
        self.params = params
        self.usage = usage
        self.identity = identity
        self.make_chunk = partial(
            Chunk,
            id=identity.id,
            object=CHUNK,
            created=identity.created,
            model=identity.model,
        )

    def open_stream(self) -> bytes:
        """A chunk with the role, for each answer."""
        return b"".join(
            self._write(ChunkChoice(index=index, delta=Delta(role="assistant", content="")))
            for index in range(self.params.n)
        )

    def write_pieces(self, pieces: list[Piece]) -> bytes:
        """A chunk for each answer that has news, and one more where it ends."""
        return b"".join(map(self._write_piece, pieces))

    def _write_piece(self, piece: Piece) -> bytes:
        output, events = piece.output, b""
        logprobs: ChatLogprobs | None = None
        if output.logprobs:
            logprobs = make_chat_logprobs(
                output.token_ids, output.logprobs, self.params.logprobs or 0
            )
        if output.text or logprobs is not None:
            delta = Delta(content=output.text)
            events = self._write(ChunkChoice(index=piece.choice, delta=delta, logprobs=logprobs))
        if output.finish_reason is not None:
            events += self._write(
                LastChunkChoice(
                    index=piece.choice,
                    delta=Delta(),
                    finish_reason=output.finish_reason,
                    stop_reason=output.stop_reason,
                )
            )
        return events

    def close_stream(self) -> bytes:
        """The usage, if it was asked for."""
        return self.usage.write_last(self.identity, CHUNK)

    def _write(self, choice: ChunkChoice) -> bytes:
        return encode_event(self.make_chunk(choices=[choice], usage=self.usage.of_chunk()))
