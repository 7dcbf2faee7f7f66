"""`headstock run`: text from prompts in flags, a file or standard input; a chat on a terminal."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO

from attrs import evolve

from headstock.cli.answers import show_error
from headstock.cli.batch import PromptBatch
from headstock.cli.inputs import (
    PROMPT_SOURCES,
    STDIN,
    InvalidPrompt,
    PromptInput,
    as_conversation,
    read_chat_options,
    read_flags,
    read_lines,
    read_stdin,
)
from headstock.cli.notes import print_note, start_logs
from headstock.cli.process import check_distinct_files, reserve_output, resume_collections
from headstock.cli.tables import print_summary
from headstock.config.effective import ResolvedConfig
from headstock.config.flag_parser import WORDS, FlagParser
from headstock.config.flags import add_engine_flags, add_sampling_flags, resolve_flags
from headstock.errors import HeadstockError, RequestError, UsageError
from headstock.requests.progress_bars import ProgressBars
from headstock.sampling_params import SamplingParams
from headstock.text.prompt import check_unicode
from headstock.text.tokenizer import check_vocabulary

if TYPE_CHECKING:
    from headstock.requests.session import EngineSession
    from headstock.spi import Ranks

EPILOG = """
A line of FILE.jsonl is an object with "prompt", "prompt_token_ids" or "messages", and any sampling
parameters of its own, such as {"prompt": "Hello", "max_tokens": 20}; "priority" (lower goes first)
and "cache_salt" (prefixes are shared only within one salt) too. "messages" may have "tools",
"tool_choice", "parallel_tool_calls", "chat_template", "chat_template_kwargs", "reasoning_effort",
"documents", "add_generation_prompt" and "continue_final_message" beside them. With no prompt and a
terminal, a chat begins.

exit codes:
    0  all answered                 6  a model or file cannot be read
    1  some prompts failed         70  the engine died
    2  usage                      130  Ctrl-C
    3  a broken plugin            141  the output's reader has gone
    4  a plugin for another SPI   143  SIGTERM
    5  cannot run here
"""


COMMON_FLAGS = (
    *("--prompt", "--input", "--chat", "--system", "--json", "--verbose", "--quiet"),
    *("--max-tokens", "--temperature", "--top-p", "--top-k", "--seed", "--stop"),
    *("--config", "--model", "--quant", "--device", "--dtype", "--max-seq-len", "--attn", "--tp"),
)
"""The flags that `--help` lists."""


def main(arguments: list[str]) -> int:
    """Run `headstock run ARGUMENTS` and return the exit code.

    raises: HeadstockError, KeyboardInterrupt
    """
    return answer(make_parser().parse_args(arguments))


def answer(args: Namespace) -> int:
    """Answer the prompts of parsed arguments and return the exit code.

    raises: HeadstockError, KeyboardInterrupt
    """
    args.prompt = [*getattr(args, WORDS)[1:], *args.prompt]
    resolved = resolve_flags(args, os.environ)
    for line in resolved.notes:
        print_note(f"note: {line}")
    _check_flags(args, resolved)
    start_logs(resolved, quiet=args.quiet)
    # deferred: a parser of flags needs no plugins
    from headstock.startup.ranks import started_ranks

    # Other ranks import torch while this process reads prompts and does so too.
    with started_ranks(resolved.engine) as ranks:
        return _answer_prompts(args, resolved, ranks)


def _answer_prompts(args: Namespace, resolved: ResolvedConfig, ranks: Ranks) -> int:
    """Answer the prompts and return the exit code.   raises: HeadstockError, KeyboardInterrupt"""
    options = read_chat_options(args.tools, args.chat_template_kwargs)
    inputs = _collect_prompts(args, options, is_chat=_is_chat(args, resolved))
    if inputs is None:
        # deferred for start-up time: only a chat needs a line editor
        from headstock.cli.chat_session import run_chat
        from headstock.cli.turns import history_path, open_reader

        _check_chat(resolved)
        _require_tokenizer(resolved)
        read = open_reader(history_path(args.history, os.environ))
        with open_model(
            resolved, ranks, quiet=args.quiet, verbose=args.verbose, alone=True
        ) as session:
            return run_chat(
                session,
                session.default_chat_params.replace(resolved.sampling),
                args.system,
                read,
                options,
            )
    with reserve_output(args.json) as output:
        return _run_batch(args, resolved, ranks, inputs, output if args.json else None)


def _run_batch(
    args: Namespace,
    resolved: ResolvedConfig,
    ranks: Ranks,
    inputs: Sequence[PromptInput | InvalidPrompt],
    json_output: TextIO | None,
) -> int:
    """Answer the prompts and return the exit code.   raises: HeadstockError, KeyboardInterrupt"""
    good = list(_select_valid(inputs, json_output))
    if not good:
        return RequestError.exit_code
    if any(
        prompt_input.conversation is not None or isinstance(prompt_input.content, str)
        for _, prompt_input in good
    ):
        _require_tokenizer(resolved)
    with open_model(resolved, ranks, quiet=args.quiet, verbose=args.verbose) as session:
        batch = PromptBatch(
            session=session,
            json_output=json_output,
            quiet=args.quiet,
            sampling=resolved.sampling,
            total=len(inputs),
        )
        return batch.run(good)


def make_parser(verb: str = "run") -> FlagParser:
    """The parser of `headstock run` and `headstock chat`."""
    root = FlagParser(
        prog=f"headstock {verb}",
        usage="%(prog)s [MODEL [PROMPT]] [options]",
        hint=" (the first word is the model, the second a prompt; give more with --prompt TEXT)",
        max_words=2,
        common=COMMON_FLAGS,
        description="Generate text: one prompt, a file of prompts, or a chat. MODEL is an "
        "installed checkpoint's name, a directory, a GGUF file, or a hub id.",
        epilog=EPILOG,
    )
    section = root.add_argument_group("prompts and output")
    section.add_argument(
        "-p",
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="may be given several times",
    )
    section.add_argument(
        "--input", metavar="FILE.jsonl", help="one prompt a line, as JSON; - reads standard input"
    )
    section.add_argument(
        "--chat", action="store_true", help="put each prompt through the model's chat template"
    )
    section.add_argument("--system", metavar="TEXT", help="system message of chats; implies --chat")
    section.add_argument(
        "--tools",
        metavar="FILE.json",
        help="tools that chats offer, a list in OpenAI's format; implies --chat",
    )
    section.add_argument(
        "--chat-template-kwargs",
        metavar="JSON",
        help='variables of the chat template, such as {"enable_thinking": false}; implies --chat',
    )
    section.add_argument(
        "--history",
        metavar="FILE|off",
        help="file for the history of a chat's lines (default: headstock/history in the user's "
        "state folder)",
    )
    section.add_argument(
        "--json", action="store_true", help="print one JSON line an answer instead of text"
    )
    section.add_argument(
        "-v", "--verbose", action="store_true", help="show plugins, memory and times at the start"
    )
    section.add_argument(
        "--quiet",
        action="store_true",
        help="no summary, no statistics and no log line below WARNING",
    )
    add_sampling_flags(root)
    add_engine_flags(root)
    return root


def _check_flags(args: Namespace, resolved: ResolvedConfig) -> None:
    """Refuse values that no model could take, and files that would be overwritten.

    This comes before a model is loaded, which may take minutes.
    raises: UsageError
    """
    source = None if args.input == STDIN else args.input
    check_distinct_files(
        {"--config": resolved.file, "--input": source, "--record": resolved.engine.record}
    )
    try:
        check_unicode(args.system or "", "--system")
        SamplingParams(max_tokens=None).replace(resolved.sampling)
    except RequestError as error:
        raise UsageError(str(error)) from error


def _is_chat(args: Namespace, resolved: ResolvedConfig) -> bool:
    """Whether prompts go through the chat template."""
    return (
        args.chat
        or args.system is not None
        or args.tools is not None
        or args.chat_template_kwargs is not None
        # A template from a file or variable may be there for every run; a flag is for this one.
        or resolved.origins["chat_template"].startswith("flag ")
    )


def _collect_prompts(
    args: Namespace, options: Mapping[str, Any], *, is_chat: bool
) -> list[PromptInput | InvalidPrompt] | None:
    """The prompts in order; None without prompts, if a terminal can chat.

    raises: UsageError, ModelError
    """
    inputs = read_flags(args.prompt)
    if args.input is not None:
        if args.input == STDIN and has_terminal():
            print_note("reading JSON lines from the terminal; Ctrl-D on an empty line ends them")
        inputs += read_lines(args.input)
    if not inputs:
        if has_terminal():
            if args.json:
                raise UsageError(f"--json needs a prompt: give {PROMPT_SOURCES}")
            return None
        inputs = [read_stdin()]
    return (
        [as_conversation(prompt_input, args.system, options) for prompt_input in inputs]
        if is_chat
        else inputs
    )


def has_terminal() -> bool:
    """Whether standard input is a terminal."""
    return sys.stdin is not None and sys.stdin.isatty()


def _check_chat(resolved: ResolvedConfig) -> None:
    """Raise UsageError for sampling parameters that a chat cannot show."""
    if resolved.sampling.get("n", 1) != 1:
        raise UsageError(
            f"n {resolved.sampling['n']}: a chat gives one answer; to have several, give "
            f"{PROMPT_SOURCES}"
        )
    for name in ("logprobs", "prompt_logprobs"):
        if resolved.sampling.get(name) is not None:
            raise UsageError(
                f"{name}: a chat shows no log-probabilities; to have them, give {PROMPT_SOURCES}"
            )


def _require_tokenizer(resolved: ResolvedConfig) -> None:
    """Raise ModelError when a model that is on this machine has no tokenizer for text.

    Other faults of the model are left to loading it.
    """
    from headstock.startup.model_loading import locate_model
    from headstock.weights import find_cached

    # Before the engine starts, as far as that downloads nothing: weights take minutes to load.
    try:
        directory = locate_model(resolved.engine.model, find_cached, resolved.engine.revision)
    except HeadstockError:
        return
    check_vocabulary(directory)


def _select_valid(
    inputs: Sequence[PromptInput | InvalidPrompt], json_output: TextIO | None
) -> Iterator[tuple[int, PromptInput]]:
    """The valid prompts with their numbers from 1; the error of each other input is printed."""
    for number, prompt_input in enumerate(inputs, start=1):
        if isinstance(prompt_input, PromptInput):
            yield number, prompt_input
        else:
            show_error(prompt_input.where, number, prompt_input.reason, json_output)


def open_model(
    resolved: ResolvedConfig,
    ranks: Ranks | None = None,
    *,
    quiet: bool,
    verbose: bool = False,
    alone: bool = False,
) -> EngineSession:
    """Load the model and print its summary on standard error, with `verbose` all of it.

    With `alone` one request runs at a time, so CUDA graphs of one row are enough.
    """
    from headstock.requests.session import EngineSession, start_engine

    config = resolved.engine
    # Graphs of other sizes would take memory and time at the start for nothing.
    if alone and resolved.origins["cuda_graph_max_bs"] == "default":
        config = evolve(config, cuda_graph_max_bs=1)
    with ProgressBars(shown=not quiet) as bars:
        start = partial(start_engine, on_progress=bars.update, ranks=ranks)
        session = EngineSession(config, start)
    resume_collections()
    if not quiet:
        print_summary(session.list_summary(verbose=verbose))
    return session
