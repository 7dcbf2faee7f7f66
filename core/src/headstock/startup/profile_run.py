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
from headstock.startup.assemble import Assembly, Material, assemble
from headstock.startup.memory_plan import Spent

LOG = logging.getLogger(__name__)

WORST = (0.7, 0.9, 0.05, 1.1, 0.1, 0.1)
"""Sampling that needs the most memory: temperature, top_p, min_p and all penalties."""


PATIENCE = 5.0
"""Seconds for which nobody wants a reason."""

DEFAULT_GRAPH_TOKENS = 2048
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


def measure(material: Material, make_buffers: Callable[[], Buffers], max_len: int) -> Spent:
    """What steps, backends and graphs take on a CUDA device, by doing it all once over a pool of
    two pages.

    raises: CannotRun; torch.OutOfMemoryError
    """
    gc.collect()
    torch.cuda.empty_cache()
    buffers = make_buffers()
    tables = sum(each.nbytes for each in (buffers.tokens, *buffers.page_tables))
    before = settled_bytes()
    assembly = assemble(material, buffers, max_len)
    activations = worst_step(assembly, material, max_len)
    capturable = rehearse(assembly, most_rows(material))
    sizes = graph_sizes(assembly.runner, material)
    workspaces = max(before - settled_bytes(), 0) + tables
    graphs = graph_bytes(assembly, sizes) if capturable else 0
    assembly.executor.close()
    del assembly, buffers
    gc.collect()
    torch.cuda.empty_cache()
    return Spent(
        activations=activations, workspaces=workspaces, graphs=graphs, capturable=capturable
    )


def most_rows(material: Material) -> int:
    """The most rows that graphs are wanted for."""
    config = material.config
    most = config.max_running_requests
    return most if config.cuda_graph_max_bs is None else min(most, config.cuda_graph_max_bs)


def graph_sizes(runner: Runner, material: Material) -> GraphSizes:
    """The sizes that the runner captures graphs of under this configuration."""
    config = material.config
    rows = runner.buckets(most_rows(material))
    most = (
        DEFAULT_GRAPH_TOKENS
        if config.cuda_graph_max_tokens is None
        else config.cuda_graph_max_tokens
    )
    tokens = runner.prompt_buckets(min(most, config.max_batch_tokens)) if rows else ()
    return GraphSizes(rows, tokens)


def settled_bytes() -> int:
    """Bytes that are free on the device, what torch keeps for later not counted as used."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


def worst_step(assembly: Assembly, material: Material, longest: int) -> int:
    """The bytes that the largest step takes while it runs: all rows, all of the token budget, and
    sampling with every setting. Its tokens lie in the dummy page.
    """
    config, sampling = material.config, assembly.sampling
    rows = min(config.max_running_requests, config.max_batch_tokens)
    counts = np.full(rows, min(config.max_batch_tokens // rows, longest), np.int32)
    counts[0] = min(config.max_batch_tokens - int(counts[1:].sum()), longest)
    starts = np.zeros(rows, np.int32)
    starts[0] = longest - counts[0]  # what penalties look at is as wide as the longest row
    seats, ones = np.arange(rows, dtype=np.int32), np.ones(rows, np.int32)
    plan = Plan(
        number=0,
        num_decode=0,
        rows=seats,
        orders=seats,
        starts=starts,
        stops=starts + counts,
        num_logits=ones,
        samples=ones,
    )
    sampling.floats[:, :rows], sampling.active[:, :rows] = (
        np.array(WORST, np.float32)[:, None],
        True,
    )
    sampling.top_k[:rows], sampling.logprobs[:rows] = 50, 5
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    assembly.executor.execute(plan, {}).wait()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_reserved() - before


def rehearse(assembly: Assembly, rows: int) -> bool:
    """Whether graphs can be captured. One is, and forgotten: what libraries take at a first capture
    is none of the graphs'.
    """
    first = GraphSizes(assembly.runner.buckets(rows)[:1])
    return None not in (capture(assembly, first, ignored), capture(assembly, GraphSizes(), ignored))


def graph_bytes(
    assembly: Assembly, sizes: GraphSizes, free: Callable[[], int] | None = None
) -> int:
    """What graphs of these sizes take; 0 when they cannot be captured.

    All are captured, since what one adds is no measure of the next: memory comes in large pieces,
    and some backends take more for each. `free` tells how many bytes are free.
    """
    free = free or settled_bytes
    before = free()
    taken = before - free() if sizes.rows and capture(assembly, sizes, ignored) else 0
    return max(taken, 0)


def ignored(done: int, total: int) -> None:
    """Tell nobody how far it is."""


def capture(
    assembly: Assembly, sizes: GraphSizes, report: Callable[[int, int], None]
) -> GraphSizes | None:
    """Capture these sizes in place of those captured before, and say which were; None, with a
    warning, when that
    fails: steps run without graphs then.
    """
    try:
        with torch.inference_mode():
            return GraphSizes(
                sizes.rows, tuple(assembly.runner.capture(sizes.rows, report, sizes.tokens))
            )
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        LOG.warning(log_event("graphs are off", because="capture failed", reason=reason))
        return None


@contextmanager
def announced(stage: str, reason: str, patience: float = PATIENCE) -> Iterator[None]:
    """Log the stage, and why it may take long, once `patience` seconds have passed, and how long it
    took in the end.
    """
    began = time.monotonic()
    notice = Timer(patience, LOG.warning, [log_event(f"still {stage}", because=reason)])
    notice.daemon = True
    notice.start()
    try:
        yield
    finally:
        notice.cancel()
        seconds = time.monotonic() - began
        if seconds > patience:
            LOG.warning(log_event(f"done {stage}", seconds=round(seconds, 1)))
