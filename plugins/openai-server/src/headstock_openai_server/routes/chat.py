"""`/v1/chat/completions`."""

from __future__ import annotations

import asyncio
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from headstock import SamplingParams
from headstock.outputs import CompletionOutput
from headstock.requests import PromptRequest
from headstock_openai_server.api.answers import (
    AnsweredCall,
    AnsweredFunction,
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChunkChoice,
    Delta,
    DeltaCall,
    DeltaFunction,
    LastChunkChoice,
)
from headstock_openai_server.api.schema import ChatBody
from headstock_openai_server.convert.conversations import make_conversation
from headstock_openai_server.convert.limits import check_limits
from headstock_openai_server.convert.logprobs import make_chat_logprobs
from headstock_openai_server.convert.sampling import make_chat_params, named_for_client
from headstock_openai_server.engine.generation import Piece
from headstock_openai_server.engine.service import Service
from headstock_openai_server.http.decoding import read_body
from headstock_openai_server.http.event_stream import run_for_client
from headstock_openai_server.http.middleware import RECORD
from headstock_openai_server.routes.answering import (
    ChunkStream,
    Identity,
    LoggedStream,
    UsageReport,
    json_response,
    make_identity,
    wait_for_answers,
    write_prompt_logprobs,
)

CHUNK = "chat.completion.chunk"


async def answer_chat(service: Service, request: Request) -> Response:
    """Answer `/v1/chat/completions`.   raises: ApiError, HeadstockError, ClientGoneError"""
    body = await read_body(request, ChatBody, service.settings)
    service.check_serving()
    identity = make_identity("chatcmpl-", service.check_model(body.model))
    record = request.scope[RECORD]
    record["model"] = identity.model
    with named_for_client(body):
        params = make_chat_params(
            body, service.default_params, service.settings.max_n, service.max_tokens
        )
        check_limits(params, service.settings)
        prompt_request = await prepare_chat(service, body, params)
        if body.stream:
            generation = await service.start_generation([prompt_request], streams=True)
            usage = UsageReport(generation, body)
            return LoggedStream(generation, ChatStream(identity, params, usage), record)  # type: ignore[return-value]
        whole = complete_chat(service, identity, prompt_request, body, record)
        return await run_for_client(request, whole)


async def prepare_chat(service: Service, body: ChatBody, params: SamplingParams) -> PromptRequest:
    """The checked request for a conversation.   raises: ApiError, RequestError, ModelError"""
    process = service.session.input_processor.process_chat

    def prepare() -> PromptRequest:
        # Here and not on the event loop: there may be 100,000 parts of messages.
        conversation = make_conversation(body, body.messages, service.settings)
        return process(
            conversation, params, body.priority or 0, cache_salt=body.cache_salt, divides=True
        )

    return await service.run_limited(prepare)


async def complete_chat(
    service: Service,
    identity: Identity,
    prompt_request: PromptRequest,
    body: ChatBody,
    record: dict[str, object],
) -> Response:
    """The whole answer.   raises: ApiError, RequestError, EngineDied"""
    usage = UsageReport(await wait_for_answers(service, [prompt_request], record), body)
    # Those of a long prompt take many milliseconds to write out.
    write = partial(write_prompt_logprobs, prompt_request, body)
    prompt_logprobs = write() if body.prompt_logprobs is None else await asyncio.to_thread(write)
    most = prompt_request.params.logprobs or 0
    choices = [
        ChatChoice(
            index=each.index,
            message=make_message(each),
            logprobs=None
            if each.logprobs is None
            else make_chat_logprobs(each.token_ids, each.logprobs, most),
            finish_reason=each.finish_reason or "stop",
            stop_reason=each.stop_reason,
        )
        for each in prompt_request.final_output().outputs
    ]
    return json_response(
        ChatCompletion(
            id=identity.id,
            created=identity.created,
            model=identity.model,
            choices=choices,
            usage=usage.count(),
            prompt_logprobs=prompt_logprobs,
        )
    )


def make_message(output: CompletionOutput) -> AssistantMessage:
    """The message of a whole answer; its text is null where it has calls alone."""
    message = AssistantMessage(content=output.text or (None if output.tool_calls else ""))
    if output.reasoning is not None:
        message.reasoning = message.reasoning_content = output.reasoning
    if output.tool_calls:
        message.tool_calls = [
            AnsweredCall(
                id=call.id, function=AnsweredFunction(name=call.name, arguments=call.arguments)
            )
            for call in output.tool_calls
        ]
    return message


def list_deltas(output: CompletionOutput) -> list[Delta]:
    """What a piece of an answer adds to its message, in as many deltas as clients need."""
    if output.reasoning is None and not output.tool_calls:  # most pieces
        return [Delta(content=output.text)] if output.text else []
    deltas = []
    if output.reasoning is not None:
        deltas.append(Delta(reasoning=output.reasoning, reasoning_content=output.reasoning))
    if output.text:
        deltas.append(Delta(content=output.text))
    for call in output.tool_calls:
        # The name alone first: clients open a call with one delta and add the arguments of others.
        # And one call a delta, since they merge deltas by what stands in their lists.
        if call.id:
            function = DeltaFunction(name=call.name, arguments="")
            opening = DeltaCall(index=call.index, id=call.id, type="function", function=function)
            deltas.append(Delta(tool_calls=[opening]))
        if call.arguments:
            function = DeltaFunction(arguments=call.arguments)
            deltas.append(Delta(tool_calls=[DeltaCall(index=call.index, function=function)]))
    return deltas


class ChatStream(ChunkStream):
    """Writes the chunks of a chat: the role, what is new, and an empty delta with the reason."""

    def __init__(self, identity: Identity, params: SamplingParams, usage: UsageReport) -> None:
        super().__init__(identity, usage, CHUNK)
        self.params = params

    def open_stream(self) -> bytes:
        """A chunk with the role, for each answer."""
        return b"".join(
            self.write_choice(ChunkChoice(index=index, delta=Delta(role="assistant", content="")))
            for index in range(self.params.n)
        )

    def make_text_choice(self, index: int, text: str) -> ChunkChoice:
        """A delta of text."""
        return ChunkChoice(index=index, delta=Delta(content=text))

    def write_piece(self, piece: Piece) -> bytes:
        """The chunks of one answer's new output."""
        output, events = piece.output, b""
        if not (output.finish_reason or output.reasoning or output.tool_calls or output.logprobs):
            return self.write_text(piece.choice, output.text) if output.text else b""
        logprobs: ChatLogprobs | None = None
        if output.logprobs:
            logprobs = make_chat_logprobs(
                output.token_ids, output.logprobs, self.params.logprobs or 0
            )
        deltas = list_deltas(output)
        if logprobs is not None and not deltas:
            deltas = [Delta(content="")]
        for delta in deltas:
            events += self.write_choice(
                ChunkChoice(index=piece.choice, delta=delta, logprobs=logprobs)
            )
            logprobs = None  # those of the whole piece are in its first chunk
        if output.finish_reason is not None:
            events += self.write_choice(
                LastChunkChoice(
                    index=piece.choice,
                    delta=Delta(),
                    finish_reason=output.finish_reason,
                    stop_reason=output.stop_reason,
                )
            )
        return events
