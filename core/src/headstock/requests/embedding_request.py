"""One prompt on its way to a vector: its request, and the update that brings it."""

from __future__ import annotations

from typing import get_args

import numpy as np
from attrs import evolve

from headstock.errors import RequestError, shorten
from headstock.outputs import EmbeddingOutput, EmbeddingRequestOutput, RequestMetrics, Update
from headstock.sampling_params import SamplingParams
from headstock.scheduler.request import PoolingKind, Request
from headstock.text.prompt import Prompt

POOLING_KINDS: tuple[str, ...] = tuple(kind for kind in get_args(PoolingKind) if kind)

SMALLEST_NORM = 1e-12
"""What a shorter vector is divided by, as torch's `normalize` does."""


def check_pooling_kind(pooling: str) -> None:
    """Raise RequestError unless `pooling` is a way to pool."""
    if pooling not in POOLING_KINDS:
        raise RequestError(
            f"pooling: expected one of {', '.join(POOLING_KINDS)}, got {shorten(pooling)}",
            "pooling",
        )


class EmbeddingRequest:
    """A checked prompt and its one request to the engine, which pools its hidden states.

    normalize: the vector gets length 1
    """

    def __init__(
        self,
        request_id: str,
        prompt: Prompt,
        pooling: PoolingKind,
        *,
        normalize: bool,
        priority: int = 0,
        user: str = "",
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.normalize = normalize
        self.requests = (
            Request(
                id=request_id,
                prompt=prompt.ids,
                max_tokens=0,
                # Nothing is sampled, so no setting of sampling may cost the step anything.
                params=SamplingParams(temperature=0.0),
                priority=priority,
                user=user,
                namespace=prompt.cache_salt,
                pooling=pooling,
            ),
        )
        self.metrics = RequestMetrics(arrival=0.0)
        self.output: EmbeddingOutput | None = None

    @property
    def must_stream(self) -> bool:
        """Never: it has one update."""
        return False

    def mark_submitted(self, request: Request, seconds: float) -> None:
        """Note that the request goes to the engine at `seconds`."""
        self.metrics = evolve(self.metrics, arrival=seconds)

    def apply_update(self, update: Update, seconds: float) -> EmbeddingRequestOutput:
        """The output that `update`, the one with a finish reason, brings at `seconds`."""
        self.metrics = evolve(
            self.metrics,
            end=seconds,
            cached_tokens=update.cached_tokens,
            preemptions=update.preemptions,
        )
        if update.embedding is None:
            reason = update.error or "the request was aborted: the engine was closed"
            self.output = EmbeddingOutput(embedding=[], error=reason)
        else:
            self.output = EmbeddingOutput(embedding=self._scale(update.embedding))
        return self.final_output()

    def _scale(self, embedding: tuple[float, ...]) -> list[float]:
        """The vector as it was asked for; every number is one of float32."""
        vector = np.array(embedding, np.float32)
        if self.normalize:
            length = float(np.linalg.norm(vector.astype(np.float64)))
            vector = (vector / max(length, SMALLEST_NORM)).astype(np.float32)
        values: list[float] = vector.tolist()
        return values

    @property
    def is_finished(self) -> bool:
        """Whether its output is there."""
        return self.output is not None

    def has_ended(self, request_id: str) -> bool:
        """Whether its one request has ended."""
        return self.is_finished

    def final_output(self) -> EmbeddingRequestOutput:
        """The output, once it is there."""
        assert self.output is not None, "internal error: the prompt is not pooled yet"
        return EmbeddingRequestOutput(
            request_id=self.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=tuple(self.prompt.tokens),
            outputs=self.output,
            metrics=self.metrics,
        )
