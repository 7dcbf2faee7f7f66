"""`/v1/embeddings`."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from headstock.outputs import CompletionOutput, Update
from headstock.requests import EmbeddingRequest, PromptRequest
from headstock_openai_server.api.pooling_answers import Embedding, EmbeddingList, EmbeddingUsage
from headstock_openai_server.api.schema import EmbeddingBody
from headstock_openai_server.convert.sampling import name_fields
from headstock_openai_server.engine.generation import Generation
from headstock_openai_server.engine.service import Service
from headstock_openai_server.http.decoding import read_body
from headstock_openai_server.http.event_stream import run_for_client
from headstock_openai_server.http.middleware import RECORD
from headstock_openai_server.routes.answering import json_response, note_generation
from headstock_openai_server.routes.completions import list_prompts

NAMES = {"prompt": "input", "prompts": "input", "n": "input"}
"""Parameter -> the client's field."""


class SingleUpdateGeneration(Generation):
    """Runs the requests of one HTTP request, each of which has one update."""

    def __init__(
        self, service: Service, prompt_requests: Sequence[PromptRequest], **options: Any
    ) -> None:
        super().__init__(service, prompt_requests, **options)
        # Further requests of a prompt find it in the prefix index, and wait for nothing else.
        for prompt_request in prompt_requests:
            self.unstarted |= {request.id: 0 for request in prompt_request.requests[1:]}

    async def _apply_update(self, update: Update, seconds: float) -> CompletionOutput:
        self.check_update(update)
        _, request = self.choices[update.id]
        output: Any = request.apply_update(update, seconds)
        self._end_choice(update.id)
        self.finish_reasons.append("stop")
        self.service.metrics.count_end("stop", seconds - self.arrival)
        return cast("CompletionOutput", output)


async def answer_embeddings(service: Service, request: Request) -> Response:
    """Answer `/v1/embeddings`.   raises: ApiError, HeadstockError, ClientGoneError"""
    body = await read_body(request, EmbeddingBody, service.settings)
    service.check_serving()
    model = service.check_model(body.model)
    record = request.scope[RECORD]
    record["model"] = model
    with name_fields(NAMES):
        # Long texts take milliseconds to tokenize.
        requests = await asyncio.to_thread(prepare_inputs, service, body)
        return await run_for_client(request, embed(service, model, requests, body, record))


def prepare_inputs(service: Service, body: EmbeddingBody) -> list[EmbeddingRequest]:
    """The checked requests.   raises: ApiError; RequestError that names the input at fault"""
    prompts = list_prompts(body.input, service.settings.max_prompts, "input")
    return service.session.input_processor.process_embeddings(
        prompts,
        body.pooling,
        normalize=body.normalize,
        prompt_name=body.prompt_name,
        priorities=[body.priority or 0] * len(prompts),
        user=body.user or "",
    )


async def embed(
    service: Service,
    model: str,
    requests: list[EmbeddingRequest],
    body: EmbeddingBody,
    record: dict[str, object],
) -> Response:
    """The whole answer.   raises: ApiError, RequestError, EngineDied"""
    count = await run_embeddings(service, requests, record)
    data = await asyncio.to_thread(write_embeddings, requests, body.encoding_format or "float")
    usage = EmbeddingUsage(prompt_tokens=count, total_tokens=count)
    return json_response(EmbeddingList(data=data, model=model, usage=usage))


async def run_embeddings(
    service: Service, requests: list[EmbeddingRequest], record: dict[str, object]
) -> int:
    """Run requests to their ends, and return the number of their tokens.

    raises: ApiError, RequestError, EngineDied
    """
    # A generation only uses the attributes that both kinds of requests have.
    alike = cast("Sequence[PromptRequest]", requests)
    async with service.open_generation(
        alike, streams=False, kind=SingleUpdateGeneration
    ) as generation:
        try:
            await generation.collect()
        finally:
            note_generation(record, generation)
        return generation.num_prompt_tokens


def write_embeddings(requests: Sequence[EmbeddingRequest], encoding: str) -> list[Embedding]:
    """The embeddings in the order of the inputs.

    encoding: "float" for numbers, "base64" for their bytes as little-endian float32
    """
    return [
        Embedding(index=index, embedding=encode(request.final_output().outputs.embedding, encoding))
        for index, request in enumerate(requests)
    ]


def encode(vector: list[float], encoding: str) -> list[float] | str:
    """The vector in the requested encoding."""
    if encoding == "float":
        return vector
    return base64.b64encode(np.array(vector, "<f4").tobytes()).decode("ascii")
