"""`headstock bench`: measure speed and record the conditions of each figure.

Heavy modules are imported when an engine is made, so `--help` and completion do not need torch.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import os
import re
import shlex
import tempfile
from argparse import Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator, Mapping, Sequence
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
    others = {text: read_against(arguments, text) for text in options.against}
    check_distinct_files(
        {
            "--config": resolved.file,
            "--output": options.output,
            "--plot": options.plot,
            "--profile": options.profile,
            "--record": resolved.engine.record,
        }
    )
    for line in resolved.notes:
        print_note(f"note: {line}")
    start_logs(resolved, quiet=options.quiet)
    results = []
    with (
        reserve_output(options.json) as output,
        open_config(options.shape, resolved) as config,
    ):
        check_output_file("--output", options.output)
        check_output_file("--profile", options.profile)
        check_output_file("--plot", options.plot)
        for result, profile in run_workloads(options, config, others):
            print_result(result, options, output)
            if profile is not None:
                print_profile(profile, result, options)
            results.append(result)
    if options.plot is not None:
        from headstock_bench.plot import draw_results

        draw_results(results, Path(options.plot))
    return int(any(each.num_finished < len(each.workload.prompts) for each in results))


def read_against(arguments: Sequence[str], text: str) -> EngineConfig:
    """The configuration of the arguments with the settings of `--against`, which win.

    raises: UsageError
    """
    words = shlex.split(text)
    for word in words:
        if not re.fullmatch(r"[a-z][\w-]*=.*", word):
            raise UsageError(
                f"--against {shorten(text)}: expected settings such as 'scheduler=prefill-first "
                f"overlap=off', got {shorten(word)}"
            )
    names = (word.partition("=") for word in words)
    flags = [f"--{name.replace('_', '-')}={value}" for name, _, value in names]
    options = make_parser().parse_args([*arguments, *flags])
    return resolve_flags(options, os.environ).engine


def make_parser() -> FlagParser:
    """The parser of `headstock bench`."""
    root = FlagParser(
        prog="headstock bench",
        usage="%(prog)s [WORKLOAD ...] [options]",
        description="Measure speed and record the conditions of each figure.",
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
        help="timed runs after a warm-up run (default: 3)",
    )
    section.add_argument(
        "--compare",
        metavar="|".join(PEERS),
        help="run the same work in this process with another engine, alternating",
    )
    section.add_argument(
        "--against",
        action="append",
        default=[],
        metavar="SETTINGS",
        help="run the same work in this process with other settings too, alternating, such as "
        "'scheduler=prefill-first cache_type=naive'; several times for several. All share the "
        "memory equally",
    )
    section.add_argument(
        "--plot", metavar="FILE.svg", help="draw the figures of all settings with their spread"
    )
    section.add_argument(
        "--limits",
        action="store_true",
        help="show the device's minimum time, computed from the measured speed of a copy and of a "
        "matrix product",
    )
    section.add_argument(
        "--json", action="store_true", help="print one JSON object per workload instead of text"
    )
    section.add_argument(
        "--output", metavar="FILE", help="append the JSON objects to a file, one per line"
    )
    section.add_argument(
        "--profile",
        metavar="FILE",
        help="run each workload once more under torch's profiler, show where a step's time goes, "
        "and append that to a file as JSON objects, one per line",
    )
    section.add_argument(
        "--quiet",
        action="store_true",
        help="no summary, no progress and no log lines below WARNING",
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
    if options.plot is not None:
        check_plot(options.plot)
    if options.runs < 1:
        raise UsageError(f"--runs: expected 1 or more, got {options.runs}")


def check_plot(path: str) -> None:
    """Raise UsageError for another ending than .svg, or where nothing can draw."""
    if not path.endswith(".svg"):
        raise UsageError(f"--plot: expected a name that ends with .svg, got {shorten(path)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install 'headstock-bench[plot]'")


@contextlib.contextmanager
def open_config(shape: str | None, resolved: ResolvedConfig) -> Iterator[EngineConfig]:
    """The configuration to measure. With `shape`, its model directory exists inside the context.

    By default, graphs are captured before the first step instead of between timed steps.

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
    """Raise ModelError if the file cannot be appended to; None means no file.

    A benchmark takes minutes, so it must not find this out at its end.
    """
    if path is None:
        return
    try:
        with open(path, "a"):
            pass
    except OSError as error:
        raise ModelError(f"{flag} {shorten(path)}: cannot be written: {error.strerror}") from error


def run_workloads(
    options: Namespace, config: EngineConfig, others: Mapping[str, EngineConfig]
) -> Iterator[tuple[BenchmarkResult, WorkloadProfile | None]]:
    """Yield the result of each named workload, or of the device's default ones, with its profile
    if requested.

    others: by what `--against` says, the configurations to compare with; of the same model
    """
    from headstock.llm import get_session
    from headstock_bench.benchmark import Benchmark

    same = {name: getattr(config, name) for name in ("model", "load_format", "defer_graphs")}
    configs = [config, *(evolve(other, **same) for other in others.values())]
    with contextlib.ExitStack() as stack:
        llm, *rivals = (
            stack.enter_context(open_llm(each, quiet=options.quiet))
            for each in share_memory(configs)
        )
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
        benchmark.add_settings(dict(zip(others, rivals, strict=True)))
        if options.compare is not None:
            benchmark.add_transformers()
        if options.limits:
            benchmark.add_limits()
        # all first: if the last one does not fit, it is refused before any is measured
        workloads = [benchmark.fit_workload(draw_workload(name)) for name in names]
        with _leave_out_of_collections():
            for workload, notes in workloads:
                result = benchmark.measure(workload, notes)
                yield result, benchmark.profile(workload) if options.profile is not None else None


def open_llm(config: EngineConfig, *, quiet: bool) -> headstock.LLM:
    """An engine, with a bar while it loads.   raises: HeadstockError"""
    from headstock.llm import start_engine

    with ProgressBars(shown=not quiet) as bars:
        return headstock.LLM(config=config, start=partial(start_engine, on_progress=bars.update))


def share_memory(configs: Sequence[EngineConfig]) -> Iterator[EngineConfig]:
    """The configurations with as much memory for each, of what the one before has left.

    One that says how large its pool is keeps that.
    """
    count = len(configs)
    for index, config in enumerate(configs):
        is_sized = any(
            getattr(config, name) is not None
            for name in ("num_pages", "kv_memory_mb", "kv_context_len")
        )
        share = config.memory_ratio / count
        yield config if is_sized else evolve(config, memory_ratio=share / (1 - index * share))


@contextlib.contextmanager
def _leave_out_of_collections() -> Iterator[None]:
    """Exclude all current objects from garbage collection, as servers do.

    A full collection visits everything that torch and transformers define. It made a step of an 8B
    model at 8 requests a second take 113 ms, by far the slowest of its run.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def draw_workload(name: str) -> Workload:
    """The workload of a name that passed `check_options`."""
    return draw_latency_workload(name) if is_latency_workload(name) else WORKLOADS[name]()


def print_progress(workload: str, num_runs: int, total: int) -> None:
    """Print a line between two runs."""
    # not a progress bar, whose thread draws while the clock runs
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
