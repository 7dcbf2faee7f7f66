"""One prompt on its way through the engine: its requests, and their updates as output."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from attrs import evolve

from headstock.outputs import CompletionOutput, RequestMetrics, RequestOutput, Update
from headstock.sampling_params import SamplingParams
from headstock.scheduler.request import Request
from headstock.text.answer import AnswerFormat
from headstock.text.completion import CompletionBuilder
from headstock.text.logprobs import LogprobTable, read_tokens
from headstock.text.prompt import Prompt
from headstock.text.tokenizer import Tokenizer

PromptLogprobs = list[LogprobTable | None] | None


class PromptRequest:
    """A checked prompt and its `params.n` requests to the engine, one for each completion.

    `max_output_tokens` is the room beside the prompt, and `max_tokens` the most of a completion:
    that, or `params.max_tokens` if it is less. `seed` is the first request's; the others' are
    derived from it. Requests of higher `priority` go first. With `answer_format` the outputs are
    divided.
    """

    def __init__(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        tokenizer: Tokenizer,
        stop_ids: tuple[int, ...],
        max_output_tokens: int,
        seed: int,
        priority: int = 0,
        answer_format: AnswerFormat | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.tokenizer = tokenizer
        self.answer_format = answer_format
        tokens = prompt.ids
        self.max_tokens = (
            max_output_tokens
            if params.max_tokens is None
            else min(params.max_tokens, max_output_tokens)
        )
        self.requests = tuple(
            Request(
                id=f"{request_id}-{index}" if params.n > 1 else request_id,
                prompt=tokens,
                max_tokens=self.max_tokens,
                min_tokens=params.min_tokens,
                stop_ids=stop_ids,
                prompt_logprobs=params.prompt_logprobs is not None and index == 0,
                params=params.for_answer(index, seed),
                priority=priority,
                user=params.user or "",
                extra_args=params.extra_args,
                namespace=prompt.cache_salt,
            )
            for index in range(params.n)
        )
        self.metrics = RequestMetrics(arrival=0.0)
        self.prompt_logprobs: PromptLogprobs = None

    def mark_submitted(self, request: Request, seconds: float) -> None:
        """Note that `request` goes to the engine at `seconds`; the first one sets the arrival."""
        if request is self.requests[0]:
            self.metrics = evolve(self.metrics, arrival=seconds)

    def apply_update(self, update: Update, seconds: float) -> RequestOutput:
        """The output with the piece that `update`, which came at `seconds`, adds."""
        completion = self.completions[update.id]
        piece = completion.apply_update(update)
        completion.joined.add(piece)
        # What comes with the first token has `cached_tokens`.
        if update.cached_tokens is not None or completion.is_finished:
            self.update_metrics(update, seconds)
        prompt_logprobs = None
        if update.prompt_logprobs is not None:
            tables = read_tokens(
                self.prompt.tokens,
                update.prompt_logprobs,
                self.tokenizer,
                skip_special_tokens=self.params.skip_special_tokens,
            )
            prompt_logprobs = self.prompt_logprobs = [each.table for each in tables]
        return self._make_output([piece], prompt_logprobs)

    def update_metrics(self, update: Update, seconds: float) -> None:
        """Bring the metrics up to date with the first update of a request, or its last."""
        changes: dict[str, Any] = {}
        # The first request's alone: the other completions find in the cache what it computed.
        if update.cached_tokens is not None and update.id == self.requests[0].id:
            changes["cached_tokens"] = update.cached_tokens
            changes["queue_seconds"] = update.queue_seconds
        if update.finish_reason is not None:
            changes["preemptions"] = (self.metrics.preemptions or 0) + update.preemptions
        if update.tokens and self.metrics.first_token is None:
            changes["first_token"] = seconds
        if self.completions[update.id].is_finished and self.is_finished:
            changes["end"] = seconds
        if changes:
            self.metrics = evolve(self.metrics, **changes)

    # What updates need is made with the first of them, when the device has work, and not before.
    @cached_property
    def completions(self) -> dict[str, CompletionBuilder]:
        """The builder of each request's completion."""
        builders = {}
        prompt = self.prompt.tokens
        for index, request in enumerate(self.requests):
            builder = CompletionBuilder(
                index, request.params, self.tokenizer, self.answer_format, prompt
            )
            builders[request.id] = builder
            # The others need no more of the prompt than the first one does.
            prompt = [*builder.detokenizer.window]
        return builders

    def text_before(self, index: int | None) -> str:
        """The prompt's text before answer `index`, whose text has begun: as it was given, or that
        of its tokens without an unfinished character at its end that the answer completes. None
        stands for no answer.
        """
        if self.prompt.text is not None:
            return self.prompt.text
        text = self.tokenizer.decode(
            self.prompt.tokens, skip_special_tokens=self.params.skip_special_tokens
        )
        return text[: len(text) - self._count_replaced(index)]

    def logprobs_before(self, index: int | None) -> list[LogprobTable | None]:
        """The prompt's tables, with tokens whose texts are those of `text_before`."""
        tables = list(self.prompt_logprobs or ())
        count = self._count_replaced(index)
        for at in reversed(range(len(tables))):
            token, table = self.prompt.tokens[at], tables[at]
            if not count or table is None:
                break
            if self.params.skip_special_tokens and token in self.tokenizer.special_ids:
                continue
            text = table[token].decoded_token
            kept = max(len(text) - count, 0)
            count -= len(text) - kept
            tables[at] = {**table, token: evolve(table[token], decoded_token=text[:kept])}
        return tables

    def _count_replaced(self, index: int | None) -> int:
        """The characters at the end of the prompt's text that answer `index` completes."""
        if index is None:
            return 0
        return self.completions[self.requests[index].id].detokenizer.num_replaced

    @property
    def must_stream(self) -> bool:
        """Whether the text may end an answer before the engine does, so that each token counts."""
        answer_format = self.answer_format
        return bool(self.params.stop) or not (answer_format is None or answer_format.allows_several)

    @property
    def is_finished(self) -> bool:
        """Whether every completion has finished."""
        return all(completion.is_finished for completion in self.completions.values())

    def has_ended(self, request_id: str) -> bool:
        """Whether the completion of this request has finished."""
        return self.completions[request_id].is_finished

    def final_output(self) -> RequestOutput:
        """The output with whole completions, once each of them has finished."""
        return self._make_output(
            [completion.joined.join() for completion in self.completions.values()],
            self.prompt_logprobs,
        )

    def _make_output(
        self, outputs: list[CompletionOutput], prompt_logprobs: PromptLogprobs
    ) -> RequestOutput:
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt.text,
            prompt_tokens=self.prompt.tokens,
            outputs=outputs,
            prompt_logprobs=prompt_logprobs,
            metrics=self.metrics,
            max_tokens=self.max_tokens,
        )
