"""`headstock run`: text from prompts given as flags, in a file or on standard input; a chat on a terminal."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from headstock.cli.answers import footer, note, show_json, show_json_error, show_prompt, show_text
from headstock.cli.inputs import Ask, Bad, from_file, from_flags, from_stdin
from headstock.config.effective import Resolved
from headstock.config.flags import FlagParser, add_engine_flags, add_sampling_flags, resolve
from headstock.errors import RequestError, UsageError
from headstock.logs import show_logs
from headstock.progress import Bars
from headstock.sampling_params import SamplingParams
from headstock.text.prompt import as_prompt, salted

if TYPE_CHECKING:
    from headstock.job import Job
    from headstock.llm import LLM

EPILOG = """
A line of FILE.jsonl is an object with "prompt", "prompt_token_ids" or "messages", and any sampling parameters of its
own, such as {"prompt": "Hello", "max_tokens": 20}; "priority" (lower goes first) and "cache_salt" (nothing is shared
with prompts of another one) too. With no prompt and a terminal, a chat begins. Exit codes: 0 all
answered, 1 some prompts failed, 2 usage, 5 cannot run here, 6 a file cannot be read, 130 interrupted.
"""


def main(arguments: list[str]) -> int:
    """Run `headstock run ARGUMENTS` and return the exit code.   raises: HeadstockError, KeyboardInterrupt"""
    asked = parser().parse_args(arguments)
    resolved = resolve(asked, os.environ)
    for line in resolved.notes:
        note(f"note: {line}")
    check_sampling(resolved)
    show_logs(resolved.engine.log_level)
    asks = everything_asked(asked)
    if asks is None:
        from headstock.cli.chat import converse

        with opened(resolved, quiet=asked.quiet, alone=True) as llm:
            return converse(llm, llm.get_default_sampling_params().replace(resolved.sampling), asked.system)
    with opened(resolved, quiet=asked.quiet) as llm:
        return Batch(llm, asked, resolved).run(asks)


def parser() -> FlagParser:
    """The parser of `headstock run`."""
    root = FlagParser(
        prog="headstock run", description="Generate text: one prompt, a file of prompts, or a chat.", epilog=EPILOG
    )
    section = root.add_argument_group("prompts and output")
    section.add_argument(
        "-p", "--prompt", action="append", default=[], metavar="TEXT", help="may be given several times"
    )
    section.add_argument("--input", metavar="FILE.jsonl", help="one prompt a line, as JSON")
    section.add_argument("--chat", action="store_true", help="put each prompt through the model's chat template")
    section.add_argument("--system", metavar="TEXT", help="system message of chats; implies --chat")
    section.add_argument("--json", action="store_true", help="print one JSON line an answer in place of text")
    section.add_argument("--quiet", action="store_true", help="no summary and no statistics on standard error")
    add_sampling_flags(root)
    add_engine_flags(root)
    return root


def check_sampling(resolved: Resolved) -> None:
    """Refuse sampling values that no model could take, before one is loaded.   raises: UsageError"""
    try:
        SamplingParams().replace(resolved.sampling)
    except RequestError as error:
        raise UsageError(str(error)) from error


def everything_asked(asked: Namespace) -> list[Ask | Bad] | None:
    """The prompts in their order; None when there are none and a terminal waits.   raises: UsageError, ModelError"""
    asks: list[Ask | Bad] = [*from_flags(asked.prompt)]
    if asked.input is not None:
        asks += from_file(asked.input)
    if asks:
        return asks
    if sys.stdin is None:
        raise UsageError("standard input is closed; give --prompt TEXT or --input FILE.jsonl")
    if not sys.stdin.isatty():
        return [from_stdin()]
    if asked.json:
        raise UsageError("--json needs a prompt: give --prompt TEXT, --input FILE.jsonl, or text on standard input")
    return None


def opened(resolved: Resolved, *, quiet: bool, alone: bool = False) -> LLM:
    """The model, its summary printed on standard error. `alone`: one request at a time, so graphs of one row do."""
    from headstock.llm import LLM

    config = resolved.engine
    if alone and resolved.origins["cuda_graph_max_bs"] == "default":
        config = evolve(config, cuda_graph_max_bs=1)
    with Bars() as bars:
        llm = LLM(config=config, report=bars.report)
    for line in () if quiet else llm.engine.summary.lines():
        print(line, file=sys.stderr)
    sys.stderr.flush()
    return llm


@frozen
class Batch:
    """Prompts that run together; an answer is printed as soon as those of the prompts before it are."""

    llm: LLM
    asked: Namespace
    resolved: Resolved

    def run(self, asks: Sequence[Ask | Bad]) -> int:
        """Print every answer and every failure; 1 when something failed, else 0."""
        found = [self.job(number, ask) for number, ask in enumerate(asks, start=1)]
        jobs = [job for job in found if job is not None]
        if len(asks) == len(jobs) == 1 and jobs[0].params.n == 1 and not self.asked.json:
            return self.stream(jobs[0])
        failed = len(jobs) < len(asks)
        waiting = [(number, ask, job) for number, (ask, job) in enumerate(zip(asks, found, strict=True), 1) if job]
        with Bars(shown=not self.asked.quiet) as bars:
            ended = 0
            for job, _ in self.llm.events(jobs):
                ended += job.ended
                bars.report("prompts", ended, len(jobs))
                while waiting and waiting[0][2].ended:
                    failed |= self.show(*waiting.pop(0))
        return int(failed)

    def job(self, number: int, ask: Ask | Bad) -> Job | None:
        """The checked prompt; None after a line about what is wrong with it."""
        try:
            if isinstance(ask, Bad):
                raise RequestError(ask.reason)
            return self.llm.intake.job(self.prompt(ask), self.params(ask), ask.priority)
        except RequestError as error:
            note(f"headstock: {ask.where}: {error}")
            if self.asked.json:
                show_json_error(ask.where, number, str(error))
            return None

    def params(self, ask: Ask) -> SamplingParams:
        """The model's defaults under the flags under the line's own."""
        return self.llm.get_default_sampling_params().replace({**self.resolved.sampling, **ask.sampling})

    def prompt(self, ask: Ask) -> Any:
        """What the engine is to go on with.   raises: RequestError, UsageError"""
        system = self.asked.system
        if ask.messages is None and not self.asked.chat and system is None:
            return salted(as_prompt(ask.prompt, self.llm.tokenizer), ask.cache_salt)
        messages = ask.messages
        if messages is None:
            if not isinstance(ask.prompt, str):
                raise RequestError("prompt must be text to go through the chat template", "prompt")
            messages = [{"role": "user", "content": ask.prompt}]
        if system is not None and isinstance(messages, list):
            messages = [{"role": "system", "content": system}, *messages]
        return salted(self.llm.chat_prompt(messages), ask.cache_salt)

    def stream(self, job: Job) -> int:
        """Print one answer as it comes; 1 when it failed, else 0."""
        tokens = 0
        show_prompt(job.prompt.text)
        try:
            for _, piece in self.llm.events([job]):
                tokens += len(piece.outputs[0].token_ids)
                print(piece.outputs[0].text, end="", flush=True)
        finally:
            print(flush=True)
        if piece.outputs[0].error is not None:
            note(f"headstock: {piece.outputs[0].error}")
            return 1
        if not self.asked.quiet:
            note(footer(piece, tokens))
        return 0

    def show(self, number: int, ask: Ask | Bad, job: Job) -> bool:
        """Print the answers to one prompt; whether one of them failed."""
        output = job.result()
        if self.asked.json:
            show_json(ask.where, number, output)
        else:
            show_text(number, output)
        errors = [answer.error for answer in output.outputs if answer.error is not None]
        for error in errors:
            note(f"headstock: {ask.where}: {error}")
        return bool(errors)
