"""`/v1/responses`: a chat whose input and output have the form of OpenAI's Responses API.

Nothing is stored: each request brings its whole conversation.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from headstock import SamplingParams
from headstock.outputs import CompletionOutput
from headstock.requests import PromptRequest
from headstock.text import ReasoningMarks, Tokenizer
from headstock_openai_server.api.errors import ApiError
from headstock_openai_server.api.ignored import IgnoredFields
from headstock_openai_server.api.responses_answer import (
    IncompleteDetails,
    InputTokens,
    InputTokensDetails,
    LifecycleEvent,
    OutputItem,
    OutputTokensDetails,
    ResponseError,
    ResponseEvent,
    ResponseObject,
    ResponseUsage,
    Status,
)
from headstock_openai_server.api.responses_body import ResponsesBody
from headstock_openai_server.api.schema import ChatBody
from headstock_openai_server.convert.conversations import to_plain
from headstock_openai_server.convert.limits import check_limits
from headstock_openai_server.convert.responses_input import CHAT_NAMES, make_chat_body
from headstock_openai_server.convert.responses_output import ItemWriter
from headstock_openai_server.convert.responses_tools import FunctionName
from headstock_openai_server.convert.sampling import (
    client_names,
    make_chat_params,
    name_fields,
)
from headstock_openai_server.engine.generation import Generation, Piece
from headstock_openai_server.engine.service import Service
from headstock_openai_server.http.decoding import IGNORED, read_body
from headstock_openai_server.http.event_stream import run_for_client
from headstock_openai_server.http.middleware import RECORD
from headstock_openai_server.routes.answering import (
    ENCODER,
    Identity,
    LoggedStream,
    json_response,
    make_identity,
    wait_for_answers,
)
from headstock_openai_server.routes.chat import count_prompt_tokens, prepare_chat

EFFORT = CHAT_NAMES["reasoning_effort"]


async def answer_response(service: Service, request: Request) -> Response:
    """Answer `/v1/responses`.   raises: ApiError, HeadstockError, ClientGoneError"""
    body = await read_body(request, ResponsesBody, service.settings)
    service.check_serving()
    identity = make_identity("resp_", service.check_model(body.model))
    record = request.scope[RECORD]
    record["model"] = identity.model
    ignored = request.scope[IGNORED]
    chat, names = await make_chat(service, body, ignored)
    with named_for_responses(chat):
        params = make_chat_params(
            chat, service.default_params, service.settings.max_n, service.max_tokens
        )
        check_limits(params, service.settings)
        prompt_request = await prepare_chat(service, chat, params, ignored, EFFORT)
        answer = ResponseAnswer(begin_response(identity, body, params), prompt_request, names)
        if body.stream:
            generation = await service.start_generation(
                [prompt_request], streams=True, answer_id=identity.id
            )
            return LoggedStream(generation, ResponseStream(answer, generation), record)  # type: ignore[return-value]
        return await run_for_client(request, complete_response(service, answer, record))


async def count_input_tokens(service: Service, request: Request) -> Response:
    """Answer `/v1/responses/input_tokens`.   raises: ApiError, HeadstockError"""
    body = await read_body(request, ResponsesBody, service.settings)
    service.check_serving()
    service.check_model(body.model)
    ignored = request.scope[IGNORED]
    chat, _ = await make_chat(service, body, ignored)
    with named_for_responses(chat):
        count = await count_prompt_tokens(service, chat, ignored, EFFORT)
        return json_response(InputTokens(input_tokens=count))


async def make_chat(
    service: Service, body: ResponsesBody, ignored: IgnoredFields
) -> tuple[ChatBody, dict[str, FunctionName]]:
    """The chat that a body asks for, and its functions' names.   raises: ApiError"""
    make = partial(make_chat_body, body, service.settings.max_messages, ignored)
    # Not on the event loop: there may be many items and parts to check.
    return make() if isinstance(body.input, str) else await asyncio.to_thread(make)


@contextmanager
def named_for_responses(chat: ChatBody) -> Iterator[None]:
    """Make errors of this block name the fields of the Responses API."""
    names = {name: CHAT_NAMES.get(field, field) for name, field in client_names(chat).items()}
    with name_fields({**CHAT_NAMES, **names}):
        yield


async def complete_response(
    service: Service, answer: ResponseAnswer, record: dict[str, object]
) -> Response:
    """The whole response.   raises: ApiError, RequestError, EngineDied"""
    generation = await wait_for_answers(service, [answer.prompt_request], record)
    (output,) = answer.prompt_request.final_output().outputs
    answer.add_piece(output)
    return json_response(answer.finish(generation))


def begin_response(
    identity: Identity, body: ResponsesBody, params: SamplingParams
) -> ResponseObject:
    """The response before anything is generated, with the request's fields."""
    text, reasoning, choice = body.text, body.reasoning, body.tool_choice
    return ResponseObject(
        id=identity.id,
        created_at=identity.created,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata or {},
        model=identity.model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        prompt_cache_key=body.prompt_cache_key,
        reasoning={"effort": reasoning.effort if reasoning else None, "summary": None},
        safety_identifier=body.safety_identifier,
        temperature=params.temperature,
        text={"format": to_plain(text.format) if text and text.format else {"type": "text"}},
        tool_choice="auto" if choice is None else to_plain(choice),
        tools=body.tools or [],
        top_p=params.top_p,
        user=body.user,
    )


class ResponseAnswer:
    """A response in progress."""

    def __init__(
        self,
        response: ResponseObject,
        prompt_request: PromptRequest,
        names: Mapping[str, FunctionName],
    ) -> None:
        self.response = response
        self.prompt_request = prompt_request
        self.writer = ItemWriter(names)
        self.finish_reason: str | None = None
        self.first_ids: list[int] = []
        self.num_reasoning_tokens: int | None = None

    def add_piece(self, piece: CompletionOutput) -> list[ResponseEvent]:
        """The events of new output."""
        events = list(self.writer.add_piece(piece))
        self.finish_reason = piece.finish_reason
        self._count_reasoning(piece)
        return events

    def _count_reasoning(self, piece: CompletionOutput) -> None:
        """Count the tokens of the reasoning, once it has ended."""
        if self.num_reasoning_tokens is not None:
            return
        self.first_ids += piece.token_ids
        if not (self.writer.has_answer or piece.finish_reason):
            return
        answer_format = self.prompt_request.answer_format
        marks = answer_format.reasoning if answer_format else None
        self.num_reasoning_tokens = (
            count_reasoning_tokens(
                self.first_ids, self.prompt_request.tokenizer, marks, self.writer.reasoning
            )
            if marks and self.writer.reasoning
            else 0
        )
        self.first_ids = []

    def finish(self, generation: Generation) -> ResponseObject:
        """The whole response."""
        is_cut = self.finish_reason == "length"
        response = self.response
        response.status = "incomplete" if is_cut else "completed"
        response.incomplete_details = IncompleteDetails() if is_cut else None
        return self._close(generation, self.writer.items)

    def fail(self, generation: Generation, error: ApiError) -> ResponseObject:
        """The response with its complete items."""
        self.response.status = "failed"
        self.response.error = ResponseError(code=error.code or error.type, message=error.message)
        whole = [item for item in self.writer.items if item.status == "completed"]
        return self._close(generation, whole)

    def _close(self, generation: Generation, items: list[OutputItem]) -> ResponseObject:
        num_prompt, num_output = generation.num_prompt_tokens, generation.num_output_tokens
        self.response.output = items
        self.response.usage = ResponseUsage(
            input_tokens=num_prompt,
            input_tokens_details=InputTokensDetails(cached_tokens=generation.num_cached_tokens),
            output_tokens=num_output,
            output_tokens_details=OutputTokensDetails(
                reasoning_tokens=self.num_reasoning_tokens or 0
            ),
            total_tokens=num_prompt + num_output,
        )
        return self.response


def count_reasoning_tokens(
    ids: Sequence[int], tokenizer: Tokenizer, marks: ReasoningMarks, reasoning: str
) -> int:
    """The tokens up to and including the mark that ends the reasoning, or up to the call that ends
    it; all if nothing ends it.
    """

    def read(count: int) -> str:
        return tokenizer.decode(ids[:count], skip_special_tokens=False)

    # A long answer is decoded many times below, which would block other answers.
    mark_id = next(iter(tokenizer.find_ids([marks.end])), None)
    if mark_id in ids:
        position = ids.index(mark_id)
        if read(position).rstrip("\n").endswith(reasoning):
            return position + 1
    whole = read(len(ids))
    start = len(marks.start) if whole.lstrip().startswith(marks.start) else 0
    end = whole.find(reasoning, start) + len(reasoning)
    rest = whole[end:].lstrip("\n")
    if not rest:
        return len(ids)
    if rest.startswith(marks.end):
        end = whole.index(marks.end, end) + len(marks.end)
    return bisect_left(range(len(ids)), end, key=lambda count: len(read(count)))


class ResponseStream:
    """Writes the events of a response; there is no `[DONE]`."""

    def __init__(self, answer: ResponseAnswer, generation: Generation) -> None:
        self.answer = answer
        self.generation = generation

    def open_stream(self) -> bytes:
        """The response, without any output."""
        return b"".join(map(self._write_lifecycle, ("created", "in_progress")))

    def write_pieces(self, pieces: list[Piece]) -> bytes:
        """The events of new output."""
        return b"".join(
            write_event(event) for piece in pieces for event in self.answer.add_piece(piece.output)
        )

    def close_stream(self) -> bytes:
        """The whole response."""
        return self._write_lifecycle(self.answer.finish(self.generation).status)

    def write_error(self, error: ApiError) -> bytes:
        """The partial response, and its error."""
        return self._write_lifecycle(self.answer.fail(self.generation, error).status)

    def _write_lifecycle(self, name: Status | str) -> bytes:
        return write_event(
            LifecycleEvent(
                type=f"response.{name}",
                sequence_number=next(self.answer.writer.numbers),
                response=self.answer.response,
            )
        )


def write_event(event: ResponseEvent) -> bytes:
    """A server-sent event with its name, which some clients rely on."""
    return b"event: " + event.type.encode() + b"\ndata: " + ENCODER.encode(event) + b"\n\n"
