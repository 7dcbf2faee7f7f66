"""`/v1/chat/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from functools import partial

from attrs import evolve
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from headstock import SamplingParams
from headstock.outputs import CompletionOutput
from headstock.requests import PromptRequest
from headstock.text import Conversation, find_template, list_variables
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
from headstock_openai_server.api.ignored import IgnoredFields
from headstock_openai_server.api.schema import ChatBody
from headstock_openai_server.convert.conversations import check_strict_tools, make_conversation
from headstock_openai_server.convert.limits import check_limits, find_num_kept
from headstock_openai_server.convert.logprobs import make_chat_logprobs
from headstock_openai_server.convert.sampling import make_chat_params, named_for_client
from headstock_openai_server.engine.generation import Piece
from headstock_openai_server.engine.service import Service
from headstock_openai_server.http.decoding import IGNORED, read_body
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
    check_strict_tools(body.tools or ())
    service.check_serving()
    identity = make_identity("chatcmpl-", service.check_model(body.model))
    record = request.scope[RECORD]
    record["model"] = identity.model
    with named_for_client(body):
        params = make_chat_params(
            body, service.default_params, service.settings.max_n, service.max_tokens
        )
        check_limits(params, service.settings)
        prompt_request = await prepare_chat(service, body, params, request.scope[IGNORED])
        if body.stream:
            generation = await service.start_generation(
                [prompt_request], streams=True, answer_id=identity.id
            )
            usage = UsageReport(generation, body)
            return LoggedStream(generation, ChatStream(identity, body, params, usage), record)  # type: ignore[return-value]
        whole = complete_chat(service, identity, prompt_request, body, record)
        return await run_for_client(request, whole)


async def prepare_chat(
    service: Service,
    body: ChatBody,
    params: SamplingParams,
    ignored: IgnoredFields,
    effort_field: str = "reasoning_effort",
) -> PromptRequest:
    """The checked request for a conversation; the rest is as in `read_conversation`.

    raises: ApiError, RequestError, ModelError
    """
    max_seq_len = service.session.engine.max_seq_len
    num_kept = find_num_kept(body.truncate_prompt_tokens, params, max_seq_len)

    def prepare() -> PromptRequest:
        conversation = read_conversation(service, body, ignored, effort_field)
        return service.session.input_processor.process_chat(
            conversation,
            params,
            body.priority or 0,
            cache_salt=body.cache_salt,
            divides=True,
            num_kept=num_kept,
        )

    # Not on the event loop: there may be 100,000 parts of messages.
    return await service.run_limited(prepare)


async def count_prompt_tokens(
    service: Service, body: ChatBody, ignored: IgnoredFields, effort_field: str
) -> int:
    """The number of tokens of the prompt of a conversation; the rest is as in `prepare_chat`."""

    def count() -> int:
        conversation = read_conversation(service, body, ignored, effort_field)
        return len(service.session.input_processor.render_chat(conversation).tokens)

    return await service.run_limited(count)


def read_conversation(
    service: Service, body: ChatBody, ignored: IgnoredFields, effort_field: str
) -> Conversation:
    """The conversation of a body; `ignored` gets fields without effect.

    effort_field: what the client calls `reasoning_effort`
    raises: ApiError, RequestError
    """
    conversation = make_conversation(body, body.messages, service.settings, ignored)
    if not (ignored.refuses or service.session.input_processor.reads_effort(conversation)):
        ignored.add(effort_field)
        conversation = evolve(conversation, reasoning_effort=None)
    return conversation


def read_variables(service: Service, *, has_tools: bool) -> Collection[str]:
    """The variables that the chat template reads.   raises: HeadstockError without a template"""
    session = service.session
    template = session.input_processor.template
    return list_variables(find_template(session.tokenizer, template, has_tools=has_tools)) or ()


async def complete_chat(
    service: Service,
    identity: Identity,
    prompt_request: PromptRequest,
    body: ChatBody,
    record: dict[str, object],
) -> Response:
    """The whole answer.   raises: ApiError, RequestError, EngineDied"""
    usage = UsageReport(await wait_for_answers(service, [prompt_request], record), body)
    # Encoding those of a long prompt takes many milliseconds.
    write = partial(write_prompt_logprobs, prompt_request, body)
    prompt_logprobs = write() if body.prompt_logprobs is None else await asyncio.to_thread(write)
    most = prompt_request.params.logprobs or 0
    as_ids, shows_ids = bool(body.return_tokens_as_token_ids), bool(body.return_token_ids)
    choices = [
        ChatChoice(
            index=each.index,
            message=make_message(hide_reasoning(each, body)),
            logprobs=None
            if each.logprobs is None
            else make_chat_logprobs(each.token_ids, each.logprobs, most, as_ids=as_ids),
            finish_reason=each.finish_reason or "stop",
            stop_reason=each.stop_reason,
            token_ids=each.token_ids if shows_ids else UNSET,
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
            prompt_token_ids=list(prompt_request.prompt.tokens) if shows_ids else UNSET,
        )
    )


def hide_reasoning(output: CompletionOutput, body: ChatBody) -> CompletionOutput:
    """The output, without its reasoning unless the request includes it."""
    return output if body.include_reasoning is not False else evolve(output, reasoning=None)


def make_message(output: CompletionOutput) -> AssistantMessage:
    """The message of a whole answer; its text is null if it only has calls."""
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
    """The deltas that add a piece of an answer to its message."""
    if output.reasoning is None and not output.tool_calls:  # most pieces
        return [Delta(content=output.text)] if output.text else []
    deltas = []
    if output.reasoning is not None:
        deltas.append(Delta(reasoning=output.reasoning, reasoning_content=output.reasoning))
    if output.text:
        deltas.append(Delta(content=output.text))
    for call in output.tool_calls:
        # The name comes alone: clients open a call with one delta and append later arguments.
        # And one call per delta, since clients merge deltas by list position.
        if call.id:
            function = DeltaFunction(name=call.name, arguments="")
            opening = DeltaCall(index=call.index, id=call.id, type="function", function=function)
            deltas.append(Delta(tool_calls=[opening]))
        if call.arguments:
            function = DeltaFunction(arguments=call.arguments)
            deltas.append(Delta(tool_calls=[DeltaCall(index=call.index, function=function)]))
    return deltas


class ChatStream(ChunkStream):
    """Writes the chunks of a chat: the role, new output, and an empty delta with the reason."""

    def __init__(
        self, identity: Identity, body: ChatBody, params: SamplingParams, usage: UsageReport
    ) -> None:
        super().__init__(identity, usage, CHUNK)
        self.body = body
        self.params = params
        self.shows_ids = bool(body.return_token_ids)

    def open_stream(self) -> bytes:
        """A chunk with the role, for each answer; the first has the prompt's ids if requested."""
        (prompt_request,) = self.usage.generation.prompt_requests
        prompt_ids = list(prompt_request.prompt.tokens) if self.shows_ids else UNSET
        return b"".join(
            self.write_choice(
                ChunkChoice(index=index, delta=Delta(role="assistant", content="")),
                UNSET if index else prompt_ids,
            )
            for index in range(self.params.n)
        )

    def make_text_choice(self, index: int, text: str) -> ChunkChoice:
        """A delta of text."""
        return ChunkChoice(index=index, delta=Delta(content=text))

    def write_piece(self, piece: Piece) -> bytes:
        """The chunks of one answer's new output."""
        output, events = hide_reasoning(piece.output, self.body), b""
        if not (
            output.finish_reason
            or output.reasoning
            or output.tool_calls
            or output.logprobs
            or self.shows_ids
        ):
            return self.write_text(piece.choice, output.text) if output.text else b""
        logprobs: ChatLogprobs | None = None
        if output.logprobs:
            logprobs = make_chat_logprobs(
                output.token_ids,
                output.logprobs,
                self.params.logprobs or 0,
                as_ids=bool(self.body.return_tokens_as_token_ids),
            )
        token_ids = output.token_ids if self.shows_ids and output.token_ids else UNSET
        deltas = list_deltas(output)
        if (logprobs or token_ids) and not deltas:
            deltas = [Delta(content="")]
        for delta in deltas:
            events += self.write_choice(
                ChunkChoice(index=piece.choice, delta=delta, logprobs=logprobs, token_ids=token_ids)
            )
            logprobs, token_ids = None, UNSET  # those of the piece are in its first chunk
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
