"""`headstock tune`: measure the choices that `auto` makes on this machine, and save the fastest."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace, RawDescriptionHelpFormatter
from functools import partial
from typing import TYPE_CHECKING, TextIO

import attrs

import headstock
from headstock import EngineConfig, UsageError
from headstock.cli import ProgressBars, print_note, print_table, reserve_output, start_logs
from headstock.config import FlagParser, add_engine_flags, resolve_flags
from headstock.errors import shorten, suggest_name
from headstock_bench.command import open_config
from headstock_bench.model_shapes import MODEL_SHAPES

if TYPE_CHECKING:
    from headstock.startup import tuned_choices

EPILOG = """
Each attention backend that `auto` could choose here runs in its own engine, with
your model and flags; then each set of ops runs with the fastest backend. Timed
are the first token of prompts of 128 and 2,048 tokens (512 on a CPU), and the
next token of 1, 8, 32 and, on CUDA, 128 rows. A pair that takes three times as
long as the default is not measured further. A pair replaces the default if its
geometric mean is faster by 3 %. Most of the time is spent on starting engines
and, once, on compiling their kernels.

The fastest ops may also measure their own options, such as how triton divides
the work of experts. They are saved if the steps are faster with them.

Then prompts arrive while 8 rows decode, in one engine with CUDA graphs of steps
with prompts and in one without. The time to first token and the longest gap
between tokens of a row are measured. Sizes above which steps are faster by 3 %
without graphs lose them: --cuda-graph-max-tokens auto becomes lower for these
choices and this runner. Your flags affect what is measured.

The choices are saved for this model, device and software in --tuned-choices, and
auto uses them from then on.
"""


def main(arguments: list[str]) -> int:
    """Run `headstock tune ARGUMENTS`; 0.   raises: HeadstockError"""
    options = make_parser().parse_args(arguments)
    if options.shape is not None and options.shape not in MODEL_SHAPES:
        hint = suggest_name(options.shape, MODEL_SHAPES) or f"; known are {', '.join(MODEL_SHAPES)}"
        raise UsageError(f"unknown --shape {shorten(options.shape)}{hint}")
    resolved = resolve_flags(options, os.environ)
    if resolved.engine.tuned_choices is None and not options.show:
        raise UsageError("--tuned-choices: expected a directory, got off, which keeps nothing")
    for line in resolved.notes:
        print_note(f"note: {line}")
    start_logs(resolved, quiet=options.quiet)
    with (
        reserve_output(options.json) as output,
        open_config(options.shape, resolved) as config,
    ):
        run = show_choices if options.show else keep_choices
        return run(config, options, output)


def make_parser() -> FlagParser:
    """The parser of `headstock tune`."""
    root = FlagParser(
        prog="headstock tune",
        usage="%(prog)s [options]",
        description="Measure the choices that auto could make here, and save the fastest.",
        epilog=EPILOG,
        formatter_class=RawDescriptionHelpFormatter,
    )
    section = root.add_argument_group("measuring and output")
    section.add_argument(
        "--shape",
        metavar="|".join(MODEL_SHAPES),
        help="measure this architecture with random weights, without a download",
    )
    section.add_argument(
        "--show", action="store_true", help="print the saved choices without measuring"
    )
    section.add_argument("--json", action="store_true", help="print a JSON object instead of text")
    section.add_argument(
        "--quiet", action="store_true", help="no progress, no log lines below WARNING"
    )
    add_engine_flags(root)
    return root


def keep_choices(config: EngineConfig, options: Namespace, output: TextIO) -> int:
    """Measure, print the table and keep the choices; 0.   raises: HeadstockError"""
    from headstock.llm import start_engine
    from headstock.startup import tuned_choices
    from headstock_bench.tuning import tune

    def report(what: str) -> None:
        print_note(f"measuring {what}")

    def open_llm(config: EngineConfig) -> headstock.LLM:
        # Starting may compile for minutes.
        with ProgressBars(shown=not options.quiet) as bars:
            start = partial(start_engine, on_progress=bars.update)
            return headstock.LLM(config=config, start=start)

    assert config.tuned_choices is not None  # `main` has checked
    # Before measuring, which takes minutes.
    tuned_choices.create_choices_folder(config.tuned_choices)
    choices = tune(config, None if options.quiet else report, open_llm)
    path = tuned_choices.write_tuned_choices(config.tuned_choices, choices)
    print_choices(choices, options, output)
    if not options.quiet:
        print_note(f"kept in {path}")
    return 0


def show_choices(config: EngineConfig, options: Namespace, output: TextIO) -> int:
    """Print the saved choices for this model, device and software; 0.   raises: UsageError"""
    from headstock.startup import device, tuned_choices

    env = device.describe_device(config.device)
    choices, reason = tuned_choices.load_tuned_choices(config, env)
    if choices is None:
        raise UsageError(reason)
    print_choices(choices, options, output)
    return 0


def print_choices(choices: tuned_choices.TunedChoices, options: Namespace, output: TextIO) -> None:
    """Print the choices on `output`, as a table or as one JSON object."""
    if options.json:
        print(json.dumps(attrs.asdict(choices), ensure_ascii=False), file=output, flush=True)
        return
    from headstock_bench.tuning import compare_times, describe_options

    measured = [candidate for candidate in choices.candidates if candidate.milliseconds]
    rows = [
        (
            candidate.attn,
            f"{candidate.ops} *" if candidate.options else candidate.ops,
            *("-" if time is None else f"{time:.2f}" for time in candidate.milliseconds),
            f"{compare_times(candidate, measured[0]):.2f}",
        )
        for candidate in measured
    ]
    print_table(("ATTN", "OPS", *map(str.upper, choices.steps), "TIME"), rows, sys.stdout)
    print(
        "milliseconds a step; TIME is the geometric mean by that of the first line, which is what "
        "auto takes by itself"
    )
    for candidate in choices.candidates:
        if candidate.refusal:
            pair = f"--attn {candidate.attn} --ops {candidate.ops}"
            print(f"{pair} was not measured: {candidate.refusal}")
    for candidate in measured:
        if candidate.options:
            print(f"* with what was measured of it:{describe_options(candidate.options)}")
    print_buckets(choices)
    fastest = choices.fastest
    named = describe_options(fastest.options)
    if fastest.graph_tokens is not None:
        named += f" --cuda-graph-max-tokens {fastest.graph_tokens}"
    print(f"fastest: --attn {fastest.attn} --ops {fastest.ops}{named}")


def print_buckets(choices: tuned_choices.TunedChoices) -> None:
    """Print the steps with prompts that were measured with and without a graph."""
    from headstock_bench.bucket_tuning import ROWS, compare_bucket

    buckets = [each for each in choices.buckets if each.replayed and each.launched]
    rows = [
        (
            str(bucket.tokens),
            *(
                f"{time:.2f}"
                for times in (bucket.replayed, bucket.launched)
                if times is not None
                for time in (times.first_token, times.gap)
            ),
            f"{compare_bucket(bucket):.2f}",
        )
        for bucket in buckets
    ]
    header = ("SIZE", "FIRST TOKEN", "GAP", "FIRST TOKEN, NO GRAPH", "GAP, NO GRAPH", "TIME")
    if rows:
        print()
        print_table(header, rows, sys.stdout)
        print(
            f"milliseconds of a prompt beside up to {ROWS} rows that decode, by the size that "
            "their step is padded to: until its first token, and the longest gap between tokens "
            "of a row; TIME is the geometric mean of both by that without a graph"
        )
    for refusal in dict.fromkeys(each.refusal for each in choices.buckets if each.refusal):
        sizes = ", ".join(str(each.tokens) for each in choices.buckets if each.refusal == refusal)
        print(f"{sizes} tokens were not measured: {refusal}")
    if rows and choices.fastest.graph_tokens is None:
        print("no size loses its graph")
