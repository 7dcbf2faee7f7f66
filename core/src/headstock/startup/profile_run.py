"""A trial on the device before the pool is sized: what a worst step and the graphs take is
measured, not guessed.
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
from headstock.startup.assemble import AssembledExecutor, BuildInputs, assemble_executor
from headstock.startup.memory_plan import MemoryUse

LOG = logging.getLogger(__name__)

_WORST_SAMPLING = (0.7, 0.9, 0.05, 1.1, 0.1, 0.1)
"""Sampling that needs the most memory: temperature, top_p, min_p and all penalties."""


_SLOW_NOTICE_SECONDS = 5.0
"""Seconds for which nobody wants a reason."""

_DEFAULT_GRAPH_TOKENS = 2048
"""Tokens of a step above which launching its operations one by one seldom takes longer than doing
them.
"""


@frozen
class GraphSizes:
    """Which graphs are captured: row counts of decode steps, token counts of steps with prompt
    tokens.
    """

    rows: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()


def measure_memory_use(
    inputs: BuildInputs, make_buffers: Callable[[], Buffers], max_len: int
) -> MemoryUse:
    """What steps, backends and graphs take on a CUDA device, by doing it all once over a pool of
    two pages.

    raises: CannotRun; torch.OutOfMemoryError
    """
    gc.collect()
    torch.cuda.empty_cache()
    buffers = make_buffers()
    tables = sum(tensor.nbytes for tensor in (buffers.tokens, *buffers.page_tables))
    before = count_settled_bytes()
    assembled = assemble_executor(inputs, buffers, max_len)
    activations = _run_worst_step(assembled, inputs, max_len)
    capturable = try_capture(assembled, _max_graph_rows(inputs))
    sizes = graph_sizes(assembled.runner, inputs)
    workspaces = max(before - count_settled_bytes(), 0) + tables
    graphs = measure_graph_bytes(assembled, sizes) if capturable else 0
    assembled.executor.close()
    del assembled, buffers
    gc.collect()
    torch.cuda.empty_cache()
    return MemoryUse(
        activations=activations, workspaces=workspaces, graphs=graphs, capturable=capturable
    )


def _max_graph_rows(inputs: BuildInputs) -> int:
    """The most rows that graphs are wanted for."""
    config = inputs.config
    most = config.max_running_requests
    return most if config.cuda_graph_max_bs is None else min(most, config.cuda_graph_max_bs)


def graph_sizes(runner: Runner, inputs: BuildInputs) -> GraphSizes:
    """The sizes that the runner captures graphs of under this configuration."""
    config = inputs.config
    rows = runner.buckets(_max_graph_rows(inputs))
    most = (
        _DEFAULT_GRAPH_TOKENS
        if config.cuda_graph_max_tokens is None
        else config.cuda_graph_max_tokens
    )
    tokens = runner.prompt_buckets(min(most, config.max_batch_tokens)) if rows else ()
    return GraphSizes(rows, tokens)


def count_settled_bytes() -> int:
    """Bytes that are free on the device, what torch keeps for later not counted as used."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


def _run_worst_step(assembled: AssembledExecutor, inputs: BuildInputs, max_len: int) -> int:
    """The bytes that the largest step takes while it runs: all rows, all of the token budget, and
    sampling with every setting. Its tokens lie in the dummy page.
    """
    config, sampling = inputs.config, assembled.sampling
    rows = min(config.max_running_requests, config.max_batch_tokens)
    counts = np.full(rows, min(config.max_batch_tokens // rows, max_len), np.int32)
    counts[0] = min(config.max_batch_tokens - int(counts[1:].sum()), max_len)
    starts = np.zeros(rows, np.int32)
    starts[0] = max_len - counts[0]  # what penalties look at is as wide as the longest row
    seats, ones = np.arange(rows, dtype=np.int32), np.ones(rows, np.int32)
    plan = Plan(
        number=0,
        num_decode=0,
        rows=seats,
        admission_ids=seats,
        starts=starts,
        stops=starts + counts,
        num_logits=ones,
        samples=ones,
    )
    sampling.floats[:, :rows], sampling.active[:, :rows] = (
        np.array(_WORST_SAMPLING, np.float32)[:, None],
        True,
    )
    sampling.top_k[:rows], sampling.logprobs[:rows] = 50, 5
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    assembled.executor.execute(plan, {}).wait()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_reserved() - before


def try_capture(assembled: AssembledExecutor, rows: int) -> bool:
    """Whether graphs can be captured. One is, and forgotten: what libraries take at a first capture
    is none of the graphs'.
    """
    first = GraphSizes(assembled.runner.buckets(rows)[:1])
    return None not in (
        capture_graphs(assembled, first, _ignore_progress),
        capture_graphs(assembled, GraphSizes(), _ignore_progress),
    )


def measure_graph_bytes(
    assembled: AssembledExecutor, sizes: GraphSizes, free: Callable[[], int] | None = None
) -> int:
    """What graphs of these sizes take; 0 when they cannot be captured.

    All are captured, since what one adds is no measure of the next: memory comes in large pieces,
    and some backends take more for each. `free` tells how many bytes are free.
    """
    free = free or count_settled_bytes
    before = free()
    graph_bytes = (
        before - free() if sizes.rows and capture_graphs(assembled, sizes, _ignore_progress) else 0
    )
    return max(graph_bytes, 0)


def _ignore_progress(done: int, total: int) -> None:
    """Tell nobody how far it is."""


def capture_graphs(
    assembled: AssembledExecutor, sizes: GraphSizes, on_progress: Callable[[int, int], None]
) -> GraphSizes | None:
    """Capture these sizes in place of those captured before, and say which were; None, with a
    warning, when that
    fails: steps run without graphs then.
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
    """Log the stage, and why it may take long, once `patience` seconds have passed, and how long it
    took in the end.
    """
    started_at = time.monotonic()
    notice = Timer(seconds_until_notice, LOG.warning, [log_event(f"still {stage}", because=reason)])
    notice.daemon = True
    notice.start()
    try:
        yield
    finally:
        notice.cancel()
        seconds = time.monotonic() - started_at
        if seconds > seconds_until_notice:
            LOG.warning(log_event(f"done {stage}", seconds=round(seconds, 1)))
