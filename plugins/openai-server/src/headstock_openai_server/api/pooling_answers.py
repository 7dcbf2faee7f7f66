"""The answers of routes that pool hidden states: vectors and scores."""

from __future__ import annotations

from typing import Literal

import msgspec

from headstock_openai_server.api.answers import Answer


class Embedding(Answer, kw_only=True):
    """The vector of one input: numbers, or base64 of little-endian float32."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Answer, kw_only=True):
    """The token counts, summed over the inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Answer, kw_only=True):
    """The answer of `/v1/embeddings`."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class RerankedDocument(Answer, kw_only=True):
    """The text of a document."""

    text: str


class RerankResult(Answer, kw_only=True):
    """A document's place in the request, its score, and its text if requested."""

    index: int
    relevance_score: float
    document: RerankedDocument | msgspec.UnsetType = msgspec.UNSET


class Reranking(Answer, kw_only=True):
    """The answer of `/v1/rerank`: the best document first, of equals the first in the request."""

    id: str
    model: str
    results: list[RerankResult]
    usage: EmbeddingUsage


class Score(Answer, kw_only=True):
    """The score of one pair."""

    object: Literal["score"] = "score"
    index: int
    score: float


class ScoreList(Answer, kw_only=True):
    """The answer of `/v1/score`, in the order of the pairs."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage
