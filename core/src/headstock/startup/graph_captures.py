"""Capture the runner's graphs: all at the start, or the largest then and the others later."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch
from attrs import define, field, frozen

from headstock.callbacks import ProgressCallback
from headstock.errors import format_count
from headstock.execution.abstract_executor import Executor
from headstock.logs import log_event
from headstock.spi import Runner
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

CaptureReport = Callable[[int, int], None]
"""Told how many captures are done, and of how many."""


@frozen
class GraphSizes:
    """Which graphs are captured.

    `rows`: row counts of decode steps. `tokens`: token counts of steps with prompt tokens.
    """

    rows: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()

    def __str__(self) -> str:
        prompts = (
            f" and {format_count(len(self.tokens), 'token count')} up to {self.tokens[0]}"
            if self.tokens
            else ""
        )
        return f"{format_count(len(self.rows), 'batch size')} up to {self.rows[0]}{prompts}"


def count_graph_rows(inputs: BuildInputs) -> int:
    """The most rows of a decode step that a graph is captured for."""
    config = inputs.config
    most = config.max_running_requests
    return most if config.cuda_graph_max_bs is None else min(most, config.cuda_graph_max_bs)


def graph_sizes(runner: Runner, inputs: BuildInputs) -> GraphSizes:
    """List the sizes that the runner captures graphs of under this configuration."""
    config = inputs.config
    # A replay calls neither attention nor operations, so there would be nothing to compare.
    if config.debug_attention or config.debug_ops:
        return GraphSizes()
    rows = runner.buckets(count_graph_rows(inputs))
    budget, most = config.max_batch_tokens, config.cuda_graph_max_tokens
    if not rows:
        return GraphSizes()
    if most is not None:
        return GraphSizes(rows, runner.prompt_buckets(min(most, budget)))
    tokens = runner.prompt_buckets(min(_DEFAULT_GRAPH_TOKENS, budget))
    # Under load most steps have as many tokens as they may. Their launches take the host two thirds
    # of the device's time, and as long as that where decode rows share the step.
    if tokens and budget > tokens[0]:
        tokens = (budget, *tokens)
    return GraphSizes(rows, tokens)


def can_defer(inputs: BuildInputs, assembled: AssembledExecutor) -> bool:
    """Whether graphs may be captured while requests are served."""
    # What debug flags see must be steps alone.
    return inputs.config.defer_graphs and assembled.watch is None


def count_settled_bytes() -> int:
    """Count the bytes that are free on the device after torch has returned its cached blocks."""
    wait_for_stream()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


def try_capture(assembled: AssembledExecutor, rows: int) -> bool:
    """Whether graphs can be captured: one is, and is dropped again.

    This also keeps what libraries allocate at a first capture out of the graphs' bytes.
    """
    # A capture takes the place of all earlier ones, so an empty one drops the first. 64 MiB and
    # more go to workspaces of the capture's stream, once.
    first = GraphSizes(assembled.runner.buckets(rows)[:1])
    return None not in (
        capture_graphs(assembled, first, _ignore_progress),
        capture_graphs(assembled, GraphSizes(), _ignore_progress),
    )


def measure_graph_bytes(
    assembled: AssembledExecutor,
    sizes: GraphSizes,
    free: Callable[[], int] | None = None,
    on_progress: CaptureReport | None = None,
    *,
    deferred: bool = False,
) -> int:
    """Measure what graphs of these sizes take; 0 when they cannot be captured.

    All are captured, because the bytes of one say nothing about the next: memory comes in large
    pieces, and some backends take more for each. `free` returns how many bytes are free. Where the
    graphs that serve are deferred, so are these, as the order decides how well memory is filled.
    """
    # FlashInfer keeps a workspace for each bucket: three captures showed 86 MiB, where all
    # twenty-three took 296.
    free, report = free or count_settled_bytes, on_progress or _ignore_progress
    if not sizes.rows:
        return 0
    before = free()
    if deferred and defer_graphs(assembled, sizes):
        left = total = len(sizes.rows) + len(sizes.tokens)
        while left:
            report(total - left, total)
            with torch.inference_mode():
                left = assembled.runner.capture_next()
    elif not capture_graphs(assembled, sizes, report):
        return 0
    return max(before - free(), 0)


def _ignore_progress(done: int, total: int) -> None:
    """Ignore the progress of a capture."""


def capture_graphs(
    assembled: AssembledExecutor, sizes: GraphSizes, on_progress: CaptureReport
) -> GraphSizes | None:
    """Capture graphs of these sizes in place of earlier ones; return the captured sizes.

    A capture that fails is logged as a warning and gives None: steps run without graphs then.
    """
    try:
        with torch.inference_mode():
            return GraphSizes(
                sizes.rows, tuple(assembled.runner.capture(sizes.rows, on_progress, sizes.tokens))
            )
    except Exception as error:
        _log_failure("graphs are off", error)
        return None


def defer_graphs(assembled: AssembledExecutor, sizes: GraphSizes) -> bool | None:
    """Have the runner capture these sizes later; return whether it can.

    A failure is logged as a warning and gives None: steps run without graphs then.
    """
    try:
        with torch.inference_mode():
            return assembled.runner.defer_captures(sizes.rows, sizes.tokens)
    except Exception as error:
        _log_failure("graphs are off", error)
        return None


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

    def capture_next(self, executor: Executor) -> None:
        """Capture one graph.

        When all are captured, a warning says if they took more than planned.
        """
        try:
            self.is_done = not executor.capture_next()
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

    notes: lines for the user
    late: the captures that are left
    """

    notes: tuple[str, ...] = ()
    late: LateCaptures


_OFF = "graphs are off: they could not be captured (the log says why), and every step runs without"


def capture_runner_graphs(
    assembled: AssembledExecutor,
    inputs: BuildInputs,
    memory: MemoryPlan,
    kept: KeptProfile,
    on_progress: ProgressCallback | None,
) -> CapturedGraphs:
    """Capture the runner's graphs, or have it capture them later."""
    sizes, device = graph_sizes(assembled.runner, inputs), assembled.device
    none_left = LateCaptures(device, is_done=True)
    off = CapturedGraphs(notes=(_OFF,), late=none_left)
    if not sizes.rows:
        if inputs.faults.has_pending("capture"):
            reason = f"the runner {inputs.parts.runner.name} captures nothing here"
            LOG.warning(log_event("a fault cannot happen", fault="capture", because=reason))
        return CapturedGraphs(late=none_left)
    # The profile run has tried that and said why.
    if not memory.other_use.capturable:
        return off
    use = memory.other_use
    # Where an earlier start has measured, libraries allocate their workspaces in captures too.
    planned = use.graphs + (use.workspaces if use.is_kept else 0)
    free_before, began = _count_free_bytes(device), time.monotonic()
    is_deferred = can_defer(inputs, assembled) and defer_graphs(assembled, sizes)
    if is_deferred is None:
        return off
    if is_deferred:
        seconds = time.monotonic() - began
        note = (
            f"graphs for {sizes}, {format_bytes(use.graphs)} planned, the largest captured in "
            f"{seconds:.1f} s, the others at their first use or when idle"
        )
        late = LateCaptures(device, planned, free_before, kept)
        return CapturedGraphs(notes=(note,), late=late)

    def report_graph(done: int, total: int) -> None:
        if on_progress is not None:
            on_progress(f"graphs, {format_bytes(free_bytes(device))} free", done, total)

    captured = capture_graphs(assembled, sizes, report_graph)
    if captured is None:
        return off
    seconds = time.monotonic() - began
    taken = max(free_before - _count_free_bytes(device), 0)
    _warn_of_excess(device, taken, planned, kept)
    return CapturedGraphs(
        notes=(f"graphs for {captured}, {format_bytes(taken)}, captured in {seconds:.1f} s",),
        late=none_left,
    )


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
