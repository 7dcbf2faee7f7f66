"""One prompt on its way through the engine: the requests it makes, and their news as output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import evolve

from headstock.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from headstock.sampling_params import SamplingParams
from headstock.scheduler.request import Request
from headstock.text.answer import Answer, joined, prompt_table
from headstock.text.prompt import Prompt
from headstock.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from headstock.outputs import Update

PromptLogprobs = tuple[dict[int, Logprob] | None, ...] | None


class Job:
    """A checked prompt with `params.n` requests, one an answer; `seed` is the first's, `room` is in
    output tokens.

    The higher `rank` goes first.
    """

    def __init__(
        self,
        name: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        tokenizer: Tokenizer,
        stop_ids: tuple[int, ...],
        room: int,
        seed: int,
        rank: int = 0,
    ) -> None:
        self.name = name
        self.prompt = prompt
        self.params = params
        self.tokenizer = tokenizer
        tokens = np.array(prompt.tokens, dtype=np.int32)
        self.requests = tuple(
            Request(
                id=f"{name}-{index}" if params.n > 1 else name,
                prompt=tokens,
                max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
                min_tokens=min(params.min_tokens, room),
                stop_ids=stop_ids,
                prompt_logprobs=params.prompt_logprobs is not None and index == 0,
                params=params.answer(index, seed),
                priority=rank,
                namespace=prompt.cache_salt,
            )
            for index in range(params.n)
        )
        self.answers = {
            request.id: Answer(index, request.params, tokenizer)
            for index, request in enumerate(self.requests)
        }
        self.pieces: dict[str, list[CompletionOutput]] = {
            request.id: [] for request in self.requests
        }
        self.metrics = RequestMetrics(arrival=0.0)
        self.prompt_logprobs: PromptLogprobs = None

    def begin(self, request: Request, at: float) -> None:
        """Note that `request` goes to the engine at `at` seconds; the first to go is the job's
        arrival.
        """
        if request is self.requests[0]:
            self.metrics = evolve(self.metrics, arrival=at)

    def absorb(self, update: Update, at: float) -> RequestOutput:
        """What `update`, learned at `at` seconds, adds to the output."""
        piece = self.answers[update.id].absorb(update)
        self.pieces[update.id].append(piece)
        self.measure(update, at)
        fresh = prompt_table(update.prompt_logprobs, self.tokenizer)
        self.prompt_logprobs = fresh or self.prompt_logprobs
        return self.output((piece,), fresh)

    def measure(self, update: Update, at: float) -> None:
        """Bring the metrics up to date; most news changes none."""
        new: dict[str, Any] = {}
        # the others find what it computed
        if update.cached_tokens is not None and update.id == self.requests[0].id:
            new["cached_tokens"] = update.cached_tokens
        if update.finish_reason is not None:
            new["preemptions"] = (self.metrics.preemptions or 0) + update.preemptions
        if update.tokens and self.metrics.first_token is None:
            new["first_token"] = at
        if self.ended:
            new["end"] = at
        if new:
            self.metrics = evolve(self.metrics, **new)

    @property
    def max_tokens(self) -> int:
        """The most tokens that an answer can have: those asked for, or all that there is room
        for.
        """
        return self.requests[0].max_tokens

    @property
    def ended(self) -> bool:
        """Whether every answer has ended."""
        return all(answer.ended for answer in self.answers.values())

    def result(self) -> RequestOutput:
        """All that came, once every answer has ended."""
        return self.output(
            tuple(joined(pieces) for pieces in self.pieces.values()), self.prompt_logprobs
        )

    def output(
        self, outputs: tuple[CompletionOutput, ...], prompt_logprobs: PromptLogprobs
    ) -> RequestOutput:
        """An output with these answers."""
        return RequestOutput(
            request_id=self.name,
            prompt=self.prompt.text,
            prompt_token_ids=self.prompt.tokens,
            outputs=outputs,
            prompt_logprobs=prompt_logprobs,
            metrics=self.metrics,
            max_tokens=self.max_tokens,
        )
