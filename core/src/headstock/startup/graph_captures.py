"""Capture the runner's graphs: all at the start, or the largest then and the others later."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch
from attrs import define, field, frozen

from headstock.callbacks import ProgressCallback
from headstock.errors import describe_type, format_count
from headstock.execution.abstract_executor import Executor
from headstock.logs import log_event
from headstock.ops.bound import BoundOps
from headstock.spi import CaptureProgress, Ranks, ReplayLimits, ReplaySizes, Runner
from headstock.startup.assemble import AssembledExecutor
from headstock.startup.build_inputs import BuildInputs
from headstock.startup.device import free_bytes, wait_for_stream
from headstock.startup.kept_profile import KeptProfile
from headstock.startup.memory_plan import MemoryPlan, format_bytes

LOG = logging.getLogger(__name__)

_DEFAULT_GRAPH_TOKENS = 4096
"""Tokens of a step above which graphs are not captured by default, but for full steps: there the
device, not the launch of operations, bounds the step.

Up to 2,048 a size of the 0.6B shape takes 4 MiB and 40 ms.
"""

_GRAPH_SLACK_BYTES = 64 << 20
"""Bytes by which graphs may exceed the plan unreported: the driver allocates in large pieces."""


def list_sizes(sizes: ReplaySizes) -> str:
    """Say how many sizes there are, and the largest."""
    prompts = (
        f" and {format_count(len(sizes.tokens), 'token count')} up to {sizes.tokens[0]}"
        if sizes.tokens
        else ""
    )
    return f"{format_count(len(sizes.rows), 'batch size')} up to {sizes.rows[0]}{prompts}"


def replay_limits(inputs: BuildInputs, assembled: AssembledExecutor) -> ReplayLimits:
    """Up to which sizes graphs are wanted under this configuration."""
    config = inputs.config
    rows, budget = config.max_running_requests, config.max_batch_tokens
    if config.cuda_graph_max_bs is not None:
        rows = min(rows, config.cuda_graph_max_bs)
    # A replay calls neither attention nor operations, so there would be nothing to compare.
    if config.debug_attention or config.debug_ops or not rows:
        return ReplayLimits()
    operations = inputs.parts.operations
    # A composed one goes through a prompt chunk by chunk, and so would a graph of every size.
    if isinstance(operations, BoundOps) and operations.table.has_composed("delta_rule"):
        return ReplayLimits(
            max_rows=rows, may_defer=config.defer_graphs and assembled.watch is None
        )
    most = config.cuda_graph_max_tokens
    return ReplayLimits(
        max_rows=rows,
        max_tokens=min(_DEFAULT_GRAPH_TOKENS if most is None else most, budget),
        # Under load most steps have as many tokens as they may. Their launches take the host two
        # thirds of the device's time, and as long as that where decode rows share the step.
        full_tokens=budget if most is None else 0,
        # What debug flags see must be steps alone.
        may_defer=config.defer_graphs and assembled.watch is None,
    )


def count_settled_bytes() -> int:
    """Count the bytes that are free on the device after torch has returned its cached blocks."""
    wait_for_stream()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


def try_capture(runner: Runner, limits: ReplayLimits) -> bool:
    """Whether graphs can be captured: the largest is, and is dropped again.

    This also keeps what libraries allocate at a first capture out of the graphs' bytes.
    """
    # 64 MiB and more go to workspaces of the capture's stream, once.
    largest = ReplayLimits(max_rows=limits.max_rows, may_defer=True)
    return all(prepare(runner, each) is not None for each in (largest, ReplayLimits()))


def measure_graph_bytes(
    runner: Runner,
    limits: ReplayLimits,
    free: Callable[[], int] | None = None,
    report: CaptureProgress | None = None,
) -> int:
    """Measure what graphs up to these sizes take; 0 when they cannot be captured.

    All are captured, because the bytes of one say nothing about the next: memory comes in large
    pieces, and some backends take more for each. `free` returns how many bytes are free. Where the
    graphs that serve are deferred, so are these, as the order decides how well memory is filled.
    """
    # FlashInfer keeps a workspace for each bucket: three captures showed 86 MiB, where all
    # twenty-three took 296.
    free, report = free or count_settled_bytes, report or _ignore_progress
    before, num_done = free(), 0

    def count(done: int, total: int) -> None:
        nonlocal num_done
        num_done = done
        report(done, total)

    sizes = prepare(runner, limits, count)
    if sizes is None:
        return 0
    left, total = sizes.num_left, num_done + sizes.num_left
    while left:
        with torch.inference_mode():
            left = runner.prepare_next()
        report(total - left, total)
    return max(before - free(), 0)


def _ignore_progress(done: int, total: int) -> None:
    """Ignore the progress of a capture."""


def prepare(
    runner: Runner, limits: ReplayLimits, report: CaptureProgress = _ignore_progress
) -> ReplaySizes | None:
    """Have the runner prepare its replays instead of earlier ones, and return their sizes.

    A failure is logged as a warning and gives None: steps run without graphs then.
    """
    try:
        with torch.inference_mode():
            sizes: object = runner.prepare(limits, report)
        if not isinstance(sizes, ReplaySizes):
            name = type(runner).__name__
            raise TypeError(f"{name}.prepare: expected ReplaySizes, got {describe_type(sizes)}")
    except Exception as error:
        _log_failure("graphs are off", error)
        return None
    return sizes


def _log_failure(event: str, error: Exception) -> None:
    """Log a capture that failed, in one line."""
    reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    LOG.warning(log_event(event, because="capture failed", reason=reason))


@define(eq=False)
class LateCaptures:
    """Captures while no step is due, and what they may take.

    planned: bytes that captures may take
    free_before: bytes that were free before the first capture
    kept: where the plan's figures may come from
    is_done: there is nothing left to capture
    """

    device: torch.device
    planned: int = 0
    free_before: int = 0
    kept: KeptProfile = field(factory=KeptProfile)
    is_done: bool = False

    def prepare_next(self, executor: Executor) -> None:
        """Capture one graph.

        When all are captured, a warning says if they took more than planned.
        """
        try:
            self.is_done = not executor.prepare_next()
        except Exception as error:
            self.is_done = True
            _log_failure("no more graphs are captured", error)
            return
        if not self.is_done:
            return
        taken = max(self.free_before - _count_free_bytes(self.device), 0)
        LOG.debug(log_event("all graphs are captured", taken=format_bytes(taken)))
        _warn_of_excess(self.device, taken, self.planned, self.kept)


@frozen(kw_only=True)
class CapturedGraphs:
    """What a start did about graphs.

    sizes: the steps that have graphs, those of later captures too
    notes: lines for the user
    late: the captures that are left
    """

    sizes: ReplaySizes = field(factory=ReplaySizes)
    notes: tuple[str, ...] = ()
    late: LateCaptures


_OFF = (
    "graphs are off: they could not be captured (the log says why), and every step runs without; "
    "runner (--runner) eager leaves out the attempt"
)


def capture_runner_graphs(
    assembled: AssembledExecutor,
    inputs: BuildInputs,
    memory: MemoryPlan,
    kept: KeptProfile,
    ranks: Ranks,
    on_progress: ProgressCallback | None,
) -> CapturedGraphs:
    """Capture the runner's graphs, or have it capture them later; on all ranks, or on none."""
    device, use = assembled.device, memory.other_use
    off = CapturedGraphs(notes=(_OFF,), late=LateCaptures(device, is_done=True))
    # The profile run has tried that and said why.
    if not ranks.take_least([use.capturable])[0]:
        return off

    def report_graph(done: int, total: int) -> None:
        if on_progress is not None:
            on_progress(f"graphs, {format_bytes(free_bytes(device))} free", done, total)

    free_before, began = _count_free_bytes(device), time.monotonic()
    sizes = prepare(assembled.runner, replay_limits(inputs, assembled), report_graph)
    if not ranks.take_least([sizes is not None])[0] or sizes is None:
        prepare(assembled.runner, ReplayLimits())
        return off
    if not sizes.rows:
        return CapturedGraphs(late=LateCaptures(device, is_done=True))
    seconds = time.monotonic() - began
    # Where an earlier start has measured, libraries allocate their workspaces in captures too.
    planned = use.graphs + (use.workspaces if use.is_kept else 0)
    late = LateCaptures(device, planned, free_before, kept, is_done=not sizes.num_left)
    if sizes.num_left:
        note = (
            f"graphs for {list_sizes(sizes)}, {format_bytes(use.graphs)} planned, the largest "
            f"captured in {seconds:.1f} s, the others at their first use or when idle"
        )
    else:
        taken = max(free_before - _count_free_bytes(device), 0)
        _warn_of_excess(device, taken, planned, kept)
        note = f"graphs for {list_sizes(sizes)}, {format_bytes(taken)}, captured in {seconds:.1f} s"
    return CapturedGraphs(sizes=sizes, notes=(note,), late=late)


def _warn_of_excess(device: torch.device, taken: int, planned: int, kept: KeptProfile) -> None:
    """Warn when graphs have taken more of the device than was planned; the next start measures."""
    if device.type == "cuda" and taken > planned * 1.05 + _GRAPH_SLACK_BYTES:
        kept.forget()
        LOG.warning(
            log_event(
                "graphs took more than planned",
                planned=format_bytes(planned),
                taken=format_bytes(taken),
            )
        )


def _count_free_bytes(device: torch.device) -> int:
    """Count the bytes that are free on the device; torch's cached blocks count as free."""
    return count_settled_bytes() if device.type == "cuda" else free_bytes(device)
