"""Measure what the largest step and the graphs take, before the pool is sized.

The pool takes all that is left, so a guess that is too low ends in an out-of-memory error during
serving. vLLM and SGLang run a profile for the same reason.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer

import numpy as np
import torch
from attrs import frozen

from headstock.execution.buffers import Buffers
from headstock.logs import log_event
from headstock.scheduler import Plan
from headstock.spi import Runner
from headstock.spi.arrays import Ints
from headstock.startup.assemble import AssembledExecutor, assemble_executor
from headstock.startup.build_inputs import BuildInputs
from headstock.startup.memory_plan import MemoryUse, count_scored_positions

LOG = logging.getLogger(__name__)

_WORST_SAMPLING = (0.7, 0.9, 0.05, 1.1, 0.1, 0.1)
"""Sampling that needs the most memory: temperature, top_p, min_p and all penalties."""


_SLOW_NOTICE_SECONDS = 5.0
"""Seconds that a stage may take before its reason is logged."""

_DEFAULT_GRAPH_TOKENS = 2048
"""Tokens of a step above which graphs are not captured by default, but for those of full steps:
there the device, not the launch of operations, bounds the step.
"""


@frozen
class GraphSizes:
    """Which graphs are captured.

    `rows`: row counts of decode steps. `tokens`: token counts of steps with prompt tokens.
    """

    rows: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()


def measure_memory_use(
    inputs: BuildInputs, make_buffers: Callable[[], Buffers], max_len: int
) -> MemoryUse:
    """Measure what steps, backends and graphs take on a CUDA device, over a pool of two pages.

    raises: CannotRun; torch.OutOfMemoryError
    """
    # What loading left behind, freed during the run, would hide what the run takes.
    gc.collect()
    torch.cuda.empty_cache()
    buffers = make_buffers()
    tables = sum(tensor.nbytes for tensor in (buffers.tokens, *buffers.page_tables))
    before = count_settled_bytes()
    assembled = assemble_executor(inputs, buffers, max_len)
    activations = _run_worst_step(assembled, inputs, max_len)
    # In this order: the step makes libraries allocate their workspaces, the first capture what
    # captures need; only then do more graphs show their own bytes.
    capturable = try_capture(assembled, _max_graph_rows(inputs))
    sizes = graph_sizes(assembled.runner, inputs)
    workspaces = max(before - count_settled_bytes(), 0) + tables
    graphs = measure_graph_bytes(assembled, sizes) if capturable else 0
    assembled.executor.close()
    # The pool takes this memory next, so nothing of the profile run may live on.
    del assembled, buffers
    gc.collect()
    torch.cuda.empty_cache()
    return MemoryUse(
        activations=activations, workspaces=workspaces, graphs=graphs, capturable=capturable
    )


def _max_graph_rows(inputs: BuildInputs) -> int:
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
    rows = runner.buckets(_max_graph_rows(inputs))
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


def count_settled_bytes() -> int:
    """Count the bytes that are free on the device after torch has returned its cached blocks."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


def _run_worst_step(assembled: AssembledExecutor, inputs: BuildInputs, max_len: int) -> int:
    """Run the largest step; return the bytes that it takes while it runs.

    It has all rows, the whole token budget, and sampling with every setting. Its tokens lie in the
    dummy page.
    """
    config, sampling = inputs.config, assembled.sampling
    rows = min(config.max_running_requests, config.max_batch_tokens)
    counts = np.full(rows, min(config.max_batch_tokens // rows, max_len), np.int32)
    counts[0] = min(config.max_batch_tokens - int(counts[1:].sum()), max_len)
    starts = np.zeros(rows, np.int32)
    # One row is as long as any may be. Penalties allocate as wide as the longest row, and in steps
    # with prompts FlashAttention-3 bounds its splits by that row: the demo model's activations are
    # 548 MiB with it and 108 without.
    starts[0] = max_len - counts[0]
    row_ids, ones = np.arange(rows, dtype=np.int32), np.ones(rows, np.int32)
    num_logits = ones.copy()
    # Rows that verify drafts are scored at several positions; the first row stands for them here.
    scored = count_scored_positions(config.max_running_requests, inputs.parts.max_drafts)
    num_logits[0] = min(counts[0], max(scored - rows + 1, 1))
    plan = Plan(
        number=0,
        num_decode=0,
        rows=row_ids,
        admission_ids=row_ids,
        starts=starts,
        stops=starts + counts,
        num_logits=num_logits,
        samples=ones,
    )
    sampling.floats[:, :rows], sampling.active[:, :rows] = (
        np.array(_WORST_SAMPLING, np.float32)[:, None],
        True,
    )
    sampling.top_k[:rows], sampling.logprobs[:rows] = 50, 5
    sampling.processors.is_used[:, :rows] = True
    if sampling.masks.source is not None:
        sampling.masks.source = _WorstMasks()
    # Reserved, not allocated, bytes: the pool competes with the blocks that torch keeps, which
    # fragmentation makes larger than the tensors in them.
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    assembled.executor.execute(plan, {}).wait()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_reserved() - before


class _WorstMasks:
    """Masks for every logit of a step."""

    logits: Ints

    def plan_masks(self, plan: Plan) -> _WorstMasks:
        """Mask all of the plan's logits."""
        self.logits = np.arange(int(plan.num_logits.sum()))
        return self

    def fill(self, masks: np.ndarray) -> None:
        """Allow every token."""
        masks[:] = -1


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
    assembled: AssembledExecutor, sizes: GraphSizes, free: Callable[[], int] | None = None
) -> int:
    """Measure what graphs of these sizes take; 0 when they cannot be captured.

    All are captured, because the bytes of one say nothing about the next: memory comes in large
    pieces, and some backends take more for each. `free` returns how many bytes are free.
    """
    # FlashInfer keeps a workspace for each bucket: three captures showed 86 MiB, where all
    # twenty-three took 296.
    free = free or count_settled_bytes
    before = free()
    graph_bytes = (
        before - free() if sizes.rows and capture_graphs(assembled, sizes, _ignore_progress) else 0
    )
    return max(graph_bytes, 0)


def _ignore_progress(done: int, total: int) -> None:
    """Ignore the progress of a capture."""


def capture_graphs(
    assembled: AssembledExecutor, sizes: GraphSizes, on_progress: Callable[[int, int], None]
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
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        LOG.warning(log_event("graphs are off", because="capture failed", reason=reason))
        return None


@contextmanager
def slow_notice(
    stage: str, reason: str, seconds_until_notice: float = _SLOW_NOTICE_SECONDS
) -> Iterator[None]:
    """Log why a stage takes long, once `seconds_until_notice` have passed, and its duration."""
    started_at = time.monotonic()
    notice = Timer(seconds_until_notice, LOG.warning, [log_event(f"still {stage}", because=reason)])
    notice.daemon = True  # a stage that hangs must not keep the process alive
    notice.start()
    try:
        yield
    finally:
        notice.cancel()
        seconds = time.monotonic() - started_at
        if seconds > seconds_until_notice:
            LOG.warning(log_event(f"done {stage}", seconds=round(seconds, 1)))
