"""The prompts of `headstock run`, run together, their answers printed in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, TextIO

from attrs import evolve, frozen

from headstock.cli.answers import (
    format_footer,
    format_totals,
    show_error,
    show_json,
    show_logprobs,
    show_prompt,
    show_text,
)
from headstock.cli.inputs import PromptInput
from headstock.cli.notes import print_note
from headstock.errors import RequestError, format_count
from headstock.requests.progress_bars import ProgressBars
from headstock.sampling_params import SamplingParams
from headstock.text.tokenizer import NoTokenizer

if TYPE_CHECKING:
    from headstock.requests.prompt_request import PromptRequest
    from headstock.requests.session import EngineSession


@frozen(kw_only=True)
class PromptBatch:
    """Prompts that run together and whose answers are printed in the order of the prompts.

    `json_output` gets answers as JSON lines; without it they are printed as text.
    `sampling` are the parameters from flags; `total` counts
    all prompts, the invalid ones included.
    """

    session: EngineSession
    json_output: TextIO | None
    quiet: bool
    sampling: Mapping[str, object]
    total: int

    def run(self, inputs: Sequence[tuple[int, PromptInput]]) -> int:
        """Print every answer and every failure; 1 when something failed, else 0."""
        checked = [
            (number, prompt_input, self.make_request(number, prompt_input))
            for number, prompt_input in inputs
        ]
        if isinstance(self.session.tokenizer, NoTokenizer) and self.json_output is None:
            print_note(
                "note: without a tokenizer answers have no text; --json shows their token ids"
            )
        waiting = [
            (number, prompt_input, request)
            for number, prompt_input, request in checked
            if request is not None
        ]
        self.note_cut_lengths([(prompt_input, request) for _, prompt_input, request in waiting])
        requests = [request for *_, request in waiting]
        # One answer alone can be shown as it comes; several would be mixed.
        is_alone = self.total == len(requests) == 1 and requests[0].params.n == 1
        if is_alone and self.json_output is None:
            return self.stream_answer(waiting[0][1], requests[0])
        try:
            with ProgressBars(shown=not self.quiet) as bars:
                ended = tokens = 0
                # Answers are printed whole, and a request that is not streamed costs nothing for a
                # token.
                for request, piece in self.session.stream_outputs(requests, stream_tokens=False):
                    ended += request.is_finished
                    tokens += piece.num_output_tokens
                    bars.update("prompts", ended, len(requests), tokens)
                    # In the order of the prompts: a script can pair answers with its lines.
                    while waiting and waiting[0][2].is_finished:
                        with bars.hide() if self.shares_terminal else nullcontext():
                            self.show_answers(*waiting.pop(0))
        except BrokenPipeError:  # the reader of the output has gone: show no more of it
            raise
        # Ctrl-C and a dead engine alike: answers that are complete are not thrown away.
        except BaseException:
            self.show_finished(waiting)
            raise
        outputs = [request.final_output() for request in requests]
        if outputs and not self.quiet:
            print_note(format_totals(outputs, self.total))
            self.show_drafts()
        return int(self.total > sum(output.sound for output in outputs))

    @property
    def shares_terminal(self) -> bool:
        """Whether JSON goes to a terminal, by a stream that bars know nothing of."""
        return self.json_output is not None and self.json_output.isatty()

    def show_finished(self, waiting: Sequence[tuple[int, PromptInput, PromptRequest]]) -> None:
        """Print the complete answers of an interrupted batch, and name the first other one."""
        for number, prompt_input, request in waiting:
            if request.is_finished:
                self.show_answers(number, prompt_input, request)
        unfinished = [
            prompt_input.where for _, prompt_input, request in waiting if not request.is_finished
        ]
        if unfinished:
            more = (
                f"s to {unfinished[0]} and {len(unfinished) - 1} more were"
                if len(unfinished) > 1
                else f" to {unfinished[0]} was"
            )
            print_note(f"headstock: interrupted before the answer{more} complete")

    def make_request(self, number: int, prompt_input: PromptInput) -> PromptRequest | None:
        """The request for one input; None after its error has been printed.

        raises: UsageError without a chat template
        """
        processor, params = self.session.input_processor, self.merge_params
        try:
            if prompt_input.conversation is None:
                prompt = processor.tokenize(prompt_input.content)
                salted = evolve(prompt, cache_salt=prompt_input.cache_salt)
                return processor.process(salted, params(prompt_input), prompt_input.priority)
            return processor.process_chat(
                prompt_input.conversation,
                params(prompt_input),
                prompt_input.priority,
                cache_salt=prompt_input.cache_salt or None,
                divides=self.json_output is not None,
            )
        except RequestError as error:
            show_error(prompt_input.where, number, str(error), self.json_output)
            return None

    def merge_params(self, prompt_input: PromptInput) -> SamplingParams:
        """The parameters of one input: its own over the flags over the model's defaults."""
        is_chat = prompt_input.conversation is not None
        defaults = self.session.default_chat_params if is_chat else self.session.default_params
        return defaults.replace({**self.sampling, **prompt_input.sampling})

    def note_cut_lengths(self, requests: Sequence[tuple[PromptInput, PromptRequest]]) -> None:
        """Print one note when answers are cut below the user's max_tokens.

        A model's default is cut without a note: the user did not choose it.
        """
        cut = [
            f"{prompt_input.where}: max_tokens is cut from {request.params.max_tokens} to "
            f"{request.max_tokens}"
            for prompt_input, request in requests
            if "max_tokens" in {**self.sampling, **prompt_input.sampling}
            and request.max_tokens < (request.params.max_tokens or 0)
        ]
        if cut:
            more = f" (and so for {len(cut) - 1} more)" if len(cut) > 1 else ""
            max_seq_len = self.session.engine.max_seq_len
            print_note(
                f"note: {cut[0]}{more}, the room beside the prompt in sequences of up to "
                f"{format_count(max_seq_len, 'token')}"
            )

    def stream_answer(self, prompt_input: PromptInput, request: PromptRequest) -> int:
        """Print one answer as it comes; 1 when it failed, else 0."""
        tokens = 0
        # A completion goes on from its prompt; a chat's prompt is text of the template.
        show_prompt(None if prompt_input.conversation is not None else request.prompt.text)
        try:
            for _, piece in self.session.stream_outputs([request]):
                tokens += len(piece.outputs[0].token_ids)
                print(piece.outputs[0].text, end="", flush=True)
        finally:
            print(flush=True)
        if piece.outputs[0].error is not None:
            print_note(f"headstock: {piece.outputs[0].error}")
            return 1
        self.show_request_logprobs(request)
        if not self.quiet:
            print_note(format_footer(piece, tokens))
            self.show_drafts()
        return 0

    def show_drafts(self) -> None:
        """Print what came of a proposer's drafts, if there is a proposer."""
        line = self.session.engine.stats().draft_line
        if line or self.session.config.proposer != "off":
            print_note(f"drafts: {line or 'none'}")

    def show_request_logprobs(self, request: PromptRequest) -> None:
        """Print the log-probabilities of a whole answer, if they were asked for."""
        if request.params.logprobs is not None or request.params.prompt_logprobs is not None:
            print()
            output = request.final_output()
            show_logprobs(output, output.outputs[0])

    def show_answers(self, number: int, prompt_input: PromptInput, request: PromptRequest) -> None:
        """Print the answers to one prompt, and what went wrong with them."""
        output = request.final_output()
        if self.json_output is not None:
            show_json(prompt_input.where, number, output, self.json_output)
        else:
            show_text(number, output, prompt_input.text or output.prompt)
        for answer in output.outputs:
            if answer.error is not None:
                print_note(f"headstock: {prompt_input.where}: {answer.error}")
