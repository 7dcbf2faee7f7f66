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
from threading import Event, Thread, Timer

import numpy as np
import torch

from headstock.callbacks import ProgressCallback
from headstock.execution.abstract_executor import Executor
from headstock.execution.buffers import Buffers
from headstock.logs import log_event
from headstock.scheduler import Plan
from headstock.spi.arrays import Ints
from headstock.startup.assemble import AssembledExecutor, assemble_executor
from headstock.startup.build_inputs import BuildInputs
from headstock.startup.device import wait_for_stream
from headstock.startup.graph_captures import (
    count_settled_bytes,
    measure_graph_bytes,
    replay_limits,
    try_capture,
)
from headstock.startup.memory_plan import MemoryUse, count_scored_positions

LOG = logging.getLogger(__name__)

_WORST_SAMPLING = (0.7, 0.9, 0.05, 1.1, 0.1, 0.1)
"""Sampling that needs the most memory: temperature, top_p, min_p and all penalties."""


_SLOW_NOTICE_SECONDS = 5.0
"""Seconds that a stage may take before its reason is logged."""

_SECONDS_BETWEEN_REPORTS = 0.5


class ProfileProgress:
    """Tells how far a profile run is, twice a second: a kernel may take many to compile.

    It is a context, which ends with the run.

    done, total: parts of the run: the largest step, a first capture, and each size of graphs
    """

    def __init__(
        self, on_progress: ProgressCallback | None, seconds: float = _SECONDS_BETWEEN_REPORTS
    ) -> None:
        self.on_progress = on_progress
        self.seconds = seconds
        self.done, self.total = 0, 2
        self.began = time.monotonic()
        self.ended = Event()
        self.thread = Thread(target=self._repeat, name="headstock-progress", daemon=True)

    def set_parts(self, done: int, total: int) -> None:
        """Set what is done, and of how many parts."""
        self.done, self.total = done, total
        self._report()

    def _report(self) -> None:
        """Tell how far the run is."""
        if self.on_progress is not None:
            seconds = int(time.monotonic() - self.began)
            stage = f"memory plan, {seconds} s; new kernels are compiled"
            self.on_progress(stage, self.done, self.total)

    def _repeat(self) -> None:
        """Report until the run ends, on a thread."""
        while not self.ended.wait(self.seconds):
            self._report()

    def __enter__(self) -> ProfileProgress:
        self._report()
        if self.on_progress is not None:
            self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.ended.set()
        if self.on_progress is not None:
            self.thread.join()


def measure_memory_use(
    inputs: BuildInputs,
    make_buffers: Callable[[], Buffers],
    max_len: int,
    progress: ProfileProgress | None = None,
) -> MemoryUse:
    """Measure what steps, backends and graphs take on a CUDA device, over a pool of two pages.

    raises: CannotRun; torch.OutOfMemoryError
    """
    progress = progress or ProfileProgress(None)
    # What loading left behind, freed during the run, would hide what the run takes.
    gc.collect()
    torch.cuda.empty_cache()
    buffers = make_buffers()
    tables = sum(tensor.nbytes for tensor in (buffers.tokens, *buffers.page_tables))
    before = count_settled_bytes()
    assembled = assemble_executor(inputs, buffers, max_len)
    limits = replay_limits(inputs, assembled)
    progress.set_parts(0, 2)
    activations = _run_worst_step(assembled, inputs, max_len)
    progress.set_parts(1, 2)
    # In this order: the step makes libraries allocate their workspaces, the first capture what
    # captures need; only then do more graphs show their own bytes.
    capturable = try_capture(assembled.runner, limits)
    workspaces = max(before - count_settled_bytes(), 0) + tables
    graphs = 0
    if capturable:

        def report_graph(done: int, total: int) -> None:
            progress.set_parts(2 + done, 2 + total)

        graphs = measure_graph_bytes(assembled.runner, limits, None, report_graph)
    progress.set_parts(progress.total, progress.total)
    assembled.executor.close()
    # The pool takes this memory next, so nothing of the profile run may live on.
    del assembled, buffers
    gc.collect()
    torch.cuda.empty_cache()
    return MemoryUse(
        activations=activations, workspaces=workspaces, graphs=graphs, capturable=capturable
    )


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
    wait_for_stream()
    return torch.cuda.max_memory_reserved() - before


def prove_readiness(executor: Executor) -> None:
    """Run a step of one token in the dummy page, so that all ranks have computed together.

    raises: what the step raises
    """
    one, none = np.ones(1, np.int32), np.zeros(1, np.int32)
    plan = Plan(
        number=0,
        num_decode=0,
        rows=none,
        admission_ids=none,
        starts=none,
        stops=one,
        num_logits=one,
        samples=none,
    )
    executor.execute(plan, {}).wait()


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
