"""`headstock bench`: speed, with everything that a figure depends on beside it.

Heavy modules are imported when an engine is made, so `--help` and the Tab key need no torch.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import tempfile
from argparse import Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from attrs import evolve

import headstock
from headstock import EngineConfig, ModelError, UsageError
from headstock.cli import (
    ProgressBars,
    check_distinct_files,
    print_note,
    print_summary,
    reserve_output,
    start_logs,
)
from headstock.config import FlagParser, ResolvedConfig, add_engine_flags, resolve_flags
from headstock.errors import shorten, suggest_name
from headstock_bench.latency_workloads import (
    NAME_FORMS,
    check_latency_workload,
    draw_latency_workload,
    is_latency_workload,
)
from headstock_bench.model_shapes import MODEL_SHAPES, write_model_directory
from headstock_bench.workloads import DEFAULT_WORKLOADS, WORKLOADS, Workload

if TYPE_CHECKING:
    from headstock_bench.profile import WorkloadProfile
    from headstock_bench.result import BenchmarkResult

PEERS = ("transformers",)

EPILOG = """
workloads:
  for a GPU                     offline256, single, prefix256, prefill32x4k,
                                batch8, batch32
  for a CPU                     cpu32, cpu1, shared-prefix
  online:RATE:COUNT             latencies of COUNT requests that arrive at
                                random, RATE a second, as in online:16:200
  first-token:LENGTH[:COUNT]    time to the first token of COUNT prompts
                                (default: 100) of LENGTH tokens, each sent to
                                an idle engine, as in first-token:128

The prompts are seeded token ids and end-of-sequence tokens are ignored, so
the work is the same for every model and engine. One run warms up (16 requests
where latency is measured); the prefix cache is empty when a run begins; a
figure is the median.
"""


def main(arguments: list[str]) -> int:
    """Run `headstock bench ARGUMENTS`; 1 when requests failed, else 0.   raises: HeadstockError"""
    options = make_parser().parse_args(arguments)
    check_options(options)
    resolved = resolve_flags(options, os.environ)
    check_distinct_files(
        {
            "--config": resolved.file,
            "--output": options.output,
            "--profile": options.profile,
            "--record": resolved.engine.record,
        }
    )
    for line in resolved.notes:
        print_note(f"note: {line}")
    start_logs(resolved, quiet=options.quiet)
    any_failed = False
    with (
        reserve_output(options.json) as output,
        open_config(options.shape, resolved) as config,
    ):
        check_output_file("--output", options.output)
        check_output_file("--profile", options.profile)
        for result, profile in run_workloads(options, config):
            print_result(result, options, output)
            if profile is not None:
                print_profile(profile, result, options)
            any_failed |= result.num_finished < len(result.workload.prompts)
    return int(any_failed)


def make_parser() -> FlagParser:
    """The parser of `headstock bench`."""
    root = FlagParser(
        prog="headstock bench",
        usage="%(prog)s [WORKLOAD ...] [options]",
        description="Measure speed, with everything that a figure depends on beside it.",
        epilog=EPILOG,
        formatter_class=RawDescriptionHelpFormatter,
    )
    root.add_argument(
        "workloads",
        nargs="*",
        metavar="WORKLOAD",
        help="what to measure, by the names below (default: "
        + "; ".join(f"{' '.join(names)} on {device}" for device, names in DEFAULT_WORKLOADS.items())
        + ")",
    )
    section = root.add_argument_group("measuring and output")
    section.add_argument(
        "--shape",
        metavar="|".join(MODEL_SHAPES),
        help="measure this architecture with random weights, without a download",
    )
    section.add_argument(
        "--runs",
        type=int,
        default=3,
        metavar="N",
        help="runs after a first that warms up (default: 3)",
    )
    section.add_argument(
        "--compare",
        metavar="|".join(PEERS),
        help="the same work in this process with another engine, in turns",
    )
    section.add_argument(
        "--limits",
        action="store_true",
        help="show the least time that the device would need, by a copy and a product that are "
        "timed before",
    )
    section.add_argument(
        "--json", action="store_true", help="print one JSON object a workload instead of text"
    )
    section.add_argument(
        "--output", metavar="FILE", help="append the JSON objects to a file, one a line"
    )
    section.add_argument(
        "--profile",
        metavar="FILE",
        help="run each workload once more under torch's profiler, show where a step's time goes, "
        "and append that to a file as JSON objects, one a line",
    )
    section.add_argument(
        "--quiet", action="store_true", help="no summary, no progress and no log line below WARNING"
    )
    add_engine_flags(root)
    return root


def check_options(options: Namespace) -> None:
    """Raise UsageError for an unknown workload, shape or engine, or for too few runs."""
    latency = [name for name in options.workloads if is_latency_workload(name)]
    for name in latency:
        check_latency_workload(name)
    batched = [name for name in options.workloads if name not in latency]
    for what, names, choices in (
        ("workload", batched, (*WORKLOADS, *NAME_FORMS.values())),
        ("--shape", [options.shape], MODEL_SHAPES),
        ("--compare", [options.compare], PEERS),
    ):
        for name in names:
            if name is not None and name not in choices:
                hint = suggest_name(name, choices) or f"; known are {', '.join(choices)}"
                raise UsageError(f"unknown {what} {shorten(name)}{hint}")
    if options.runs < 1:
        raise UsageError(f"--runs: expected 1 or more, got {options.runs}")


@contextlib.contextmanager
def open_config(shape: str | None, resolved: ResolvedConfig) -> Iterator[EngineConfig]:
    """The configuration to measure. With `shape`, its model directory exists inside the context.

    Unless it says otherwise, graphs are captured before the first step and not between those that
    are timed.

    raises: UsageError when a shape and a model are both named
    """
    config = resolved.engine
    if resolved.origins["defer_graphs"] == "default":
        config = evolve(config, defer_graphs=False)
    if shape is None:
        yield config
        return
    if resolved.origins["model"] != "default":
        raise UsageError(
            f"--shape {shape} and a model by {resolved.origins['model']} name two models; keep one"
        )
    with tempfile.TemporaryDirectory(prefix="headstock-") as folder:
        write_model_directory(MODEL_SHAPES[shape], Path(folder))
        yield evolve(config, model=folder, load_format="dummy")


def check_output_file(flag: str, path: str | None) -> None:
    """Raise ModelError when the file cannot be appended to; None is no file.

    A benchmark takes minutes: it must not find this out when it is done.
    """
    if path is None:
        return
    try:
        with open(path, "a"):
            pass
    except OSError as error:
        raise ModelError(f"{flag} {shorten(path)}: cannot be written: {error.strerror}") from error


def run_workloads(
    options: Namespace, config: EngineConfig
) -> Iterator[tuple[BenchmarkResult, WorkloadProfile | None]]:
    """Yield the result of each named workload, or of the default ones of the device, and its
    profile if one is asked for.
    """
    from headstock.llm import get_session, start_engine
    from headstock_bench.benchmark import Benchmark

    with ProgressBars(shown=not options.quiet) as bars:
        llm = headstock.LLM(config=config, start=partial(start_engine, on_progress=bars.update))
    with llm:
        session = get_session(llm)
        summary = session.engine.summary
        if not options.quiet:
            print_summary(session.list_summary())
        names: Sequence[str] = options.workloads or DEFAULT_WORKLOADS[summary.device]
        shape = options.shape or Path(config.model).name
        benchmark = Benchmark(
            llm,
            version=headstock.__version__,
            shape=shape,
            runs=options.runs,
            on_run=None if options.quiet else print_progress,
        )
        if options.compare is not None:
            benchmark.add_transformers()
        if options.limits:
            benchmark.add_limits()
        # all of them first: the last one may not fit, and is refused before any is measured
        workloads = [benchmark.fit_workload(draw_workload(name)) for name in names]
        with _leave_out_of_collections():
            for workload, notes in workloads:
                result = benchmark.measure(workload, notes)
                yield result, benchmark.profile(workload) if options.profile is not None else None


@contextlib.contextmanager
def _leave_out_of_collections() -> Iterator[None]:
    """Have the garbage collector look at no object that lives now, as servers do.

    A full collection looks at all that torch and transformers define. A step of an 8B model at 8
    requests a second took 113 ms so, and was the slowest of its run by far.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def draw_workload(name: str) -> Workload:
    """The workload of a name that `check_options` accepted."""
    return draw_latency_workload(name) if is_latency_workload(name) else WORKLOADS[name]()


def print_progress(workload: str, num_runs: int, total: int) -> None:
    """Print a line between two runs."""
    # not a progress bar, which has a thread that draws while the clock runs
    print_note(f"runs of {workload}: {num_runs} of {total}")


def print_result(result: BenchmarkResult, options: Namespace, output: TextIO) -> None:
    """Print a result on `output`, and append it to `--output`."""
    line = json.dumps(result.to_json(), ensure_ascii=False)
    text = line if options.json else "\n".join(result.format_lines())
    print(text, file=output, flush=True)
    if options.output is not None:
        with open(options.output, "a") as file:
            file.write(line + "\n")


def print_profile(profile: WorkloadProfile, result: BenchmarkResult, options: Namespace) -> None:
    """Print a profile, and append it to `--profile` with the conditions of the figure."""
    if not options.json:
        print("\n".join(profile.format_lines()), flush=True)
    with open(options.profile, "a") as file:
        file.write(json.dumps(result.list_conditions() | profile.to_json(), ensure_ascii=False))
        file.write("\n")
