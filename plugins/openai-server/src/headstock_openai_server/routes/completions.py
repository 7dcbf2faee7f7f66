"""`/v1/completions`."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response

from headstock import SamplingParams
from headstock.outputs import CompletionOutput
from headstock.requests import PromptRequest
from headstock_openai_server.api.answers import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
)
from headstock_openai_server.api.errors import refuse
from headstock_openai_server.api.schema import CompletionBody
from headstock_openai_server.convert.limits import check_limits, find_num_kept
from headstock_openai_server.convert.logprobs import CompletionLogprobWriter, LogprobTable
from headstock_openai_server.convert.sampling import make_completion_params, named_for_client
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

OBJECT = "text_completion"
FEW_TOKENS = 4096
"""Up to this many token ids, checking is faster than waking a thread."""


async def answer_completion(service: Service, request: Request) -> Response:
    """Answer `/v1/completions`.   raises: ApiError, HeadstockError, ClientGoneError"""
    body = await read_body(request, CompletionBody, service.settings)
    service.check_serving()
    identity = make_identity("cmpl-", service.check_model(body.model))
    record = request.scope[RECORD]
    record["model"] = identity.model
    with named_for_client(body):
        params = make_completion_params(
            body, service.default_params, service.settings.max_n, service.max_tokens
        )
        check_limits(params, service.settings)
        prompts = list_prompts(body.prompt, service.settings.max_prompts)
        check_stream(body, params)
        prepare = partial(prepare_prompts, service, body, prompts, params)
        prompt_requests = (
            prepare() if is_quick(prompts, params) else await asyncio.to_thread(prepare)
        )
        if body.stream:
            generation = await service.start_generation(
                prompt_requests, streams=True, answer_id=identity.id
            )
            usage = UsageReport(generation, body)
            stream = CompletionStream(service, identity, body, usage)
            return LoggedStream(generation, stream, record)  # type: ignore[return-value]
        whole = complete_prompts(service, identity, prompt_requests, body, record)
        return await run_for_client(request, whole)


def list_prompts(
    prompt: str | list[str | int | list[int]], most: int, name: str = "prompt"
) -> list[str | list[int]]:
    """The prompts: one text, one list of ids, or several of either.

    name: the field that has them
    raises: ApiError
    """
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise refuse(f"{name} is an empty list; give at least one", name)
    forms = set(map(type, prompt))
    if forms == {int}:
        return [cast("list[int]", prompt)]
    if len(prompt) > most:
        raise refuse(f"{name} has {len(prompt)} entries; at most {most} are taken", name)
    if len(forms) > 1:
        raise refuse(f"{name} mixes forms; give texts, or lists of token ids, or token ids", name)
    return cast("list[str | list[int]]", prompt)


def is_quick(prompts: list[str | list[int]], params: SamplingParams) -> bool:
    """Whether the request is one answer to a few token ids: text takes a millisecond per
    kilobyte."""
    first = prompts[0]
    return len(prompts) == params.n == 1 and not isinstance(first, str) and len(first) <= FEW_TOKENS


def check_stream(body: CompletionBody, params: SamplingParams) -> None:
    """Raise ApiError for features that a stream cannot show."""
    if not body.stream or not body.echo:
        return
    if body.max_tokens == 0:
        raise refuse("max_tokens 0 leaves nothing to stream; leave stream out", "stream")
    if params.n > 1 and body.logprobs is not None:
        raise refuse(
            "echo with logprobs and several answers cannot be streamed; leave stream out", "stream"
        )


def prepare_prompts(
    service: Service, body: CompletionBody, prompts: list[str | list[int]], params: SamplingParams
) -> list[PromptRequest]:
    """The checked requests.   raises: RequestError that names the prompt at fault"""
    processor = service.session.input_processor
    salted: list[Any] = list(prompts)
    if body.cache_salt is not None:
        salted = [
            {
                "prompt" if isinstance(each, str) else "prompt_token_ids": each,
                "cache_salt": body.cache_salt,
            }
            for each in prompts
        ]
    max_seq_len = service.session.engine.max_seq_len
    num_kept = find_num_kept(body.truncate_prompt_tokens, params, max_seq_len)
    if num_kept is not None:
        salted = [processor.cut_prompt(each, num_kept) for each in salted]
    return processor.process_batch(salted, params, [body.priority or 0] * len(prompts))


class ChoiceText:
    """The text and the log-probabilities of one choice, after those of the prompt if requested."""

    def __init__(
        self, service: Service, body: CompletionBody, prompt_request: PromptRequest
    ) -> None:
        tokenizer, params = service.session.tokenizer, prompt_request.params
        self.prompt_request = prompt_request
        self.echo = bool(body.echo)
        self.drops_output = body.max_tokens == 0
        self.is_open = False
        self.tokens: list[int] = []
        self.tables: list[LogprobTable | None] = []
        self.writer = (
            None
            if body.logprobs is None
            else CompletionLogprobWriter(
                tokenizer,
                body.logprobs,
                skip_special_tokens=params.skip_special_tokens,
                as_ids=bool(body.return_tokens_as_token_ids),
            )
        )

    def add_output(self, output: CompletionOutput) -> tuple[str, CompletionLogprobs | None]:
        """The text and the log-probabilities that `output` adds."""
        text = "" if self.drops_output else output.text
        if not self.drops_output:
            self.tokens += output.token_ids
            self.tables += output.logprobs or ()
        if self.echo and not self.is_open:
            # The prompt's text is final once the answer's has begun.
            if not text and output.finish_reason is None:
                return "", None
            index = None if self.drops_output else output.index
            text = self.prompt_request.text_before(index) + text
            self.tokens = [*self.prompt_request.prompt.tokens, *self.tokens]
            self.tables = [*self.prompt_request.logprobs_before(index), *self.tables]
        self.is_open = True
        tokens, tables, self.tokens, self.tables = self.tokens, self.tables, [], []
        return text, None if self.writer is None else self.writer.write(tokens, tables)


async def complete_prompts(
    service: Service,
    identity: Identity,
    prompt_requests: list[PromptRequest],
    body: CompletionBody,
    record: dict[str, object],
) -> Response:
    """The whole answer.   raises: ApiError, RequestError, EngineDied"""
    generation = await wait_for_answers(
        service, prompt_requests, record, counts_output=body.max_tokens != 0
    )
    # Encoding long prompts with log-probabilities takes many milliseconds.
    make = partial(make_choices, service, body, prompt_requests)
    return json_response(
        Completion(
            id=identity.id,
            created=identity.created,
            model=identity.model,
            choices=await asyncio.to_thread(make)
            if body.echo or body.prompt_logprobs is not None
            else make(),
            usage=UsageReport(generation, body).count(),
        )
    )


def make_choices(
    service: Service, body: CompletionBody, prompt_requests: list[PromptRequest]
) -> list[CompletionChoice]:
    """All answers: those to the first prompt, then those to the next."""
    choices: list[CompletionChoice] = []
    for prompt_request in prompt_requests:
        prompt_logprobs = write_prompt_logprobs(prompt_request, body)
        for output in prompt_request.final_output().outputs:
            text, logprobs = ChoiceText(service, body, prompt_request).add_output(output)
            choices.append(
                CompletionChoice(
                    index=len(choices),
                    text=text,
                    logprobs=logprobs,
                    finish_reason="length" if body.max_tokens == 0 else output.finish_reason,
                    stop_reason=None if body.max_tokens == 0 else output.stop_reason,
                    prompt_logprobs=prompt_logprobs,
                    **list_ids(prompt_request, output, body, is_first=True),
                )
            )
    return choices


def list_ids(
    prompt_request: PromptRequest, output: CompletionOutput, body: CompletionBody, *, is_first: bool
) -> dict[str, Any]:
    """The fields with the ids of a completion's tokens, if requested; those of the prompt come with
    what `is_first` of it.
    """
    if not body.return_token_ids:
        return {}
    ids = {"token_ids": [] if body.max_tokens == 0 else output.token_ids}
    return ids | ({"prompt_token_ids": list(prompt_request.prompt.tokens)} if is_first else {})


class CompletionStream(ChunkStream):
    """Writes the chunks of completions: text, and an empty chunk with the reason."""

    def __init__(
        self, service: Service, identity: Identity, body: CompletionBody, usage: UsageReport
    ) -> None:
        super().__init__(identity, usage, OBJECT)
        self.body = body
        self.begun: set[int] = set()
        self.texts = {
            choice: ChoiceText(service, body, prompt_request)
            for choice, prompt_request in usage.generation.choices.values()
        }

    def make_text_choice(self, index: int, text: str) -> CompletionChoice:
        """Text."""
        return CompletionChoice(index=index, text=text)

    def write_piece(self, piece: Piece) -> bytes:
        """The chunks of one answer's new output."""
        output, events = piece.output, b""
        text, logprobs = self.texts[piece.choice].add_output(output)
        shows_ids = bool(self.body.return_token_ids and output.token_ids)
        if text and logprobs is None and not shows_ids:
            events = self.write_text(piece.choice, text)
        elif text or (logprobs is not None and logprobs.tokens) or shows_ids:
            is_first = piece.choice not in self.begun
            self.begun.add(piece.choice)
            ids = list_ids(piece.prompt_request, output, self.body, is_first=is_first)
            events = self.write_choice(
                CompletionChoice(index=piece.choice, text=text, logprobs=logprobs, **ids)
            )
        if output.finish_reason is not None:
            events += self.write_choice(
                CompletionChoice(
                    index=piece.choice,
                    text="",
                    finish_reason=output.finish_reason,
                    stop_reason=output.stop_reason,
                )
            )
        return events
