"""The prompts of `headstock run`, run together, their answers printed in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from headstock.cli.answers import (
    format_footer,
    format_totals,
    print_note,
    show_error,
    show_json,
    show_logprobs,
    show_prompt,
    show_text,
)
from headstock.cli.inputs import PromptInput
from headstock.config.spelling import name_parameters
from headstock.errors import RequestError, format_count
from headstock.requests.progress import ProgressBars
from headstock.sampling_params import SamplingParams
from headstock.text.prompt import Prompt, tokenize_prompt
from headstock.text.tokenizer import NoTokenizer

if TYPE_CHECKING:
    from headstock.llm import LLM
    from headstock.requests.prompt_request import PromptRequest


@frozen(kw_only=True)
class PromptBatch:
    """Prompts that run together; an answer is printed as soon as those of the prompts before it
    are.

    `sampling` are the values given as flags, under `names`; `total` prompts were asked for, bad
    ones included.
    """

    llm: LLM
    as_json: bool
    quiet: bool
    sampling: Mapping[str, Any]
    names: Mapping[str, str]
    total: int

    def run(self, asks: Sequence[tuple[int, PromptInput]]) -> int:
        """Print every answer and every failure; 1 when something failed, else 0."""
        found = [(number, ask, self.process(number, ask)) for number, ask in asks]
        if isinstance(self.llm.tokenizer, NoTokenizer) and not self.as_json:
            print_note(
                "note: without a tokenizer answers have no text; --json shows their token ids"
            )
        waiting = [
            (number, ask, prompt_request)
            for number, ask, prompt_request in found
            if prompt_request is not None
        ]
        self.say_what_is_cut([(ask, prompt_request) for _, ask, prompt_request in waiting])
        prompt_requests = [prompt_request for *_, prompt_request in waiting]
        if (
            self.total == len(prompt_requests) == 1
            and prompt_requests[0].params.n == 1
            and not self.as_json
        ):
            return self.stream(prompt_requests[0])
        try:
            with ProgressBars(shown=not self.quiet) as bars:
                ended = tokens = 0
                for prompt_request, piece in self.llm.events(prompt_requests, stream_tokens=False):
                    ended += prompt_request.is_finished
                    tokens += piece.num_output_tokens
                    bars.update("prompts", ended, len(prompt_requests), tokens)
                    while waiting and waiting[0][2].is_finished:
                        self.show(*waiting.pop(0))
        except BrokenPipeError:  # nobody reads the rest
            raise
        except BaseException:
            self.show_the_rest(waiting)
            raise
        outputs = [prompt_request.final_output() for prompt_request in prompt_requests]
        if outputs and not self.quiet:
            print_note(format_totals(outputs, self.total))
        return int(self.total > sum(output.sound for output in outputs))

    def show_the_rest(self, waiting: Sequence[tuple[int, PromptInput, PromptRequest]]) -> None:
        """Print what has ended of the prompts that are left when the batch is broken off, and say
        what has not.
        """
        for number, ask, prompt_request in waiting:
            if prompt_request.is_finished:
                self.show(number, ask, prompt_request)
        left = [ask.where for _, ask, prompt_request in waiting if not prompt_request.is_finished]
        if left:
            more = (
                f"s to {left[0]} and {len(left) - 1} more were"
                if len(left) > 1
                else f" to {left[0]} was"
            )
            print_note(f"headstock: broken off before the answer{more} complete")

    def process(self, number: int, ask: PromptInput) -> PromptRequest | None:
        """The prompt, checked against the model; None after a line about what is wrong with it."""
        try:
            return self.llm.input_processor.process(
                self.prompt(ask), self.params(ask), ask.priority
            )
        except RequestError as error:
            said = (
                str(error)
                if error.parameter in ask.sampling
                else name_parameters(str(error), self.names)
            )
            show_error(ask.where, number, said, as_json=self.as_json)
            return None

    def params(self, ask: PromptInput) -> SamplingParams:
        """The model's defaults under the flags under the prompt's own."""
        return self.llm.get_default_sampling_params().replace({**self.sampling, **ask.sampling})

    def prompt(self, ask: PromptInput) -> Prompt:
        """What the engine is to go on with.

        raises: RequestError, UsageError without a chat template
        """
        if ask.messages is None:
            prompt = tokenize_prompt(ask.content, self.llm.tokenizer)
        else:
            prompt = self.llm.chat_prompt(ask.messages)
        return evolve(prompt, cache_salt=ask.cache_salt)

    def say_what_is_cut(self, prompt_requests: Sequence[tuple[PromptInput, PromptRequest]]) -> None:
        """Print one line when there is less room than the user's max_tokens; a model's default is
        cut in silence.
        """
        cut = [
            f"{ask.where}: max_tokens is cut from {prompt_request.params.max_tokens} to "
            f"{prompt_request.max_tokens}"
            for ask, prompt_request in prompt_requests
            if "max_tokens" in {**self.sampling, **ask.sampling}
            and prompt_request.max_tokens < (prompt_request.params.max_tokens or 0)
        ]
        if cut:
            more = f" (and so for {len(cut) - 1} more)" if len(cut) > 1 else ""
            max_seq_len = self.llm.engine.max_seq_len
            print_note(
                f"note: {cut[0]}{more}, the room beside the prompt in sequences of up to "
                f"{format_count(max_seq_len, 'token')}"
            )

    def stream(self, prompt_request: PromptRequest) -> int:
        """Print one answer as it comes; 1 when it failed, else 0."""
        tokens = 0
        show_prompt(prompt_request.prompt.text)
        try:
            for _, piece in self.llm.events([prompt_request]):
                tokens += len(piece.outputs[0].token_ids)
                print(piece.outputs[0].text, end="", flush=True)
        finally:
            print(flush=True)
        if piece.outputs[0].error is not None:
            print_note(f"headstock: {piece.outputs[0].error}")
            return 1
        self.show_scores(prompt_request)
        if not self.quiet:
            print_note(format_footer(piece, tokens))
        return 0

    def show_scores(self, prompt_request: PromptRequest) -> None:
        """Print the log-probabilities of a whole answer, if they were asked for."""
        if (
            prompt_request.params.logprobs is not None
            or prompt_request.params.prompt_logprobs is not None
        ):
            print()
            output = prompt_request.final_output()
            show_logprobs(output, output.outputs[0])

    def show(self, number: int, ask: PromptInput, prompt_request: PromptRequest) -> None:
        """Print the answers to one prompt, and what went wrong with them."""
        output = prompt_request.final_output()
        if self.as_json:
            show_json(ask.where, number, output)
        else:
            show_text(number, output)
        for answer in output.outputs:
            if answer.error is not None:
                print_note(f"headstock: {ask.where}: {answer.error}")
