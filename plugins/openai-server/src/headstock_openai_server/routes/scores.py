"""`/v1/rerank` and `/v1/score`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import cast
from uuid import uuid4

from attrs import frozen
from starlette.requests import Request
from starlette.responses import Response

from headstock.requests import PromptRequest, ScoreBatch, ScoreOptions
from headstock_openai_server.api.errors import refuse
from headstock_openai_server.api.pooling_answers import (
    EmbeddingUsage,
    RerankedDocument,
    Reranking,
    RerankResult,
    Score,
    ScoreList,
)
from headstock_openai_server.api.schema import DocumentBody, RerankBody, ScoreBody, ScoringBody
from headstock_openai_server.convert.sampling import name_fields
from headstock_openai_server.engine.service import Service
from headstock_openai_server.http.decoding import read_body
from headstock_openai_server.http.event_stream import run_for_client
from headstock_openai_server.http.middleware import RECORD
from headstock_openai_server.routes.answering import json_response, note_generation
from headstock_openai_server.routes.embeddings import SingleUpdateGeneration

PAIRS = (("text_1", "text_2"), ("queries", "documents"))
"""The names of a score's texts: vLLM's first ones, and its later ones."""


@frozen
class Scored:
    """The scores of documents, in their order, and what the answer says beside them."""

    model: str
    scores: list[float]
    usage: EmbeddingUsage


async def answer_rerank(service: Service, request: Request) -> Response:
    """Answer `/v1/rerank`.   raises: ApiError, HeadstockError, ClientGoneError"""
    body = await read_body(request, RerankBody, service.settings)
    if body.top_n is not None and body.top_n < 0:
        raise refuse(f"top_n is {body.top_n}; give a number of documents, or 0 for all", "top_n")
    documents = [
        document.text if isinstance(document, DocumentBody) else document
        for document in body.documents
    ]
    fields = ("query", "documents")
    scored = await score(service, request, body, [body.query], documents, fields)
    scores = scored.scores
    # Sorting is stable, so that equal documents stay in the order of the request.
    best = sorted(range(len(documents)), key=lambda index: -scores[index])
    results = [
        RerankResult(index=index, relevance_score=scores[index])
        for index in best[: body.top_n or len(best)]
    ]
    if body.return_documents is not False:
        for result in results:
            result.document = RerankedDocument(text=documents[result.index])
    return json_response(
        Reranking(
            id=f"rerank-{uuid4().hex}", model=scored.model, results=results, usage=scored.usage
        )
    )


async def answer_score(service: Service, request: Request) -> Response:
    """Answer `/v1/score`.   raises: ApiError, HeadstockError, ClientGoneError"""
    body = await read_body(request, ScoreBody, service.settings)
    first, second = fields = find_pair(body)
    queries, documents = list_texts(getattr(body, first)), list_texts(getattr(body, second))
    scored = await score(service, request, body, queries, documents, fields)
    return json_response(
        ScoreList(
            id=f"score-{uuid4().hex}",
            created=int(time.time()),
            model=scored.model,
            data=[Score(index=index, score=value) for index, value in enumerate(scored.scores)],
            usage=scored.usage,
        )
    )


def find_pair(body: ScoreBody) -> tuple[str, str]:
    """The names of the fields that have the texts.   raises: ApiError"""
    given = [pair for pair in PAIRS if any(getattr(body, name) is not None for name in pair)]
    if len(given) > 1:
        raise refuse(
            "text_1 and text_2 mean the same as queries and documents; give one pair", "text_1"
        )
    names = given[0] if given else PAIRS[0]
    for name in names:
        if getattr(body, name) is None:
            raise refuse(f"{name} is missing", name, "missing_required_parameter")
    return names


def list_texts(texts: str | list[str]) -> list[str]:
    """The texts, one or several, as a list."""
    return [texts] if isinstance(texts, str) else texts


async def score(
    service: Service,
    request: Request,
    body: ScoringBody,
    queries: list[str],
    documents: list[str],
    fields: tuple[str, str],
) -> Scored:
    """The scores of the documents.

    fields: the names of the queries and the documents
    raises: ApiError, HeadstockError, ClientGoneError
    """
    service.check_serving()
    model = service.check_model(body.model)
    record = request.scope[RECORD]
    record["model"] = model
    most = service.settings.max_prompts
    for name, texts in zip(fields, (queries, documents), strict=True):
        if len(texts) > most:
            raise refuse(f"{name} has {len(texts)} entries; at most {most} are taken", name)
    count = body.max_tokens_per_doc
    if count is not None and count < 1:
        raise refuse(f"max_tokens_per_doc is {count}; give 1 or more", "max_tokens_per_doc")
    options = ScoreOptions(
        instruction=body.instruction or "",
        prompt_name=body.prompt_name,
        max_document_tokens=count,
        priority=body.priority or 0,
        user=body.user or "",
        cache_salt=body.cache_salt,
        query_field=fields[0],
        document_field=fields[1],
    )
    scorer = service.session.scorer
    with name_fields({"prompt": fields[1], "n": fields[1]}):
        # Long texts take milliseconds to tokenize.
        batch = await asyncio.to_thread(scorer.process, queries, documents, options)
        usage = await run_for_client(request, run_batch(service, batch, record))
    return Scored(model, [output.score for output in batch.list_outputs()], usage)


async def run_batch(
    service: Service, batch: ScoreBatch, record: dict[str, object]
) -> EmbeddingUsage:
    """Run the requests to their ends; the token counts.   raises: ApiError, EngineDied"""
    # A generation only uses the attributes that all kinds of requests have.
    alike = cast("Sequence[PromptRequest]", batch.requests)
    async with service.open_generation(
        alike, streams=False, kind=SingleUpdateGeneration
    ) as generation:
        try:
            await generation.collect()
        finally:
            note_generation(record, generation)
        count = generation.num_prompt_tokens
        return EmbeddingUsage(prompt_tokens=count, total_tokens=count)
