"""Divide the memory of a device: weights, steps, graphs, and the KV pool."""

from __future__ import annotations

from math import prod

import torch
from attrs import frozen

from headstock.config import EngineConfig
from headstock.errors import CannotRun, format_count
from headstock.execution.kv_pools import page_shape
from headstock.spi import ModelConfig


@frozen(kw_only=True)
class MemoryUse:
    """Bytes that neither weights nor the pool take.

    `activations` are those of the largest step while it runs, `workspaces` what backends and
    libraries hold. `capturable` is False when graphs were tried and could not be captured.
    """

    activations: int
    workspaces: int = 0
    graphs: int = 0
    capturable: bool = True

    @property
    def total(self) -> int:
        """The sum of the three."""
        return self.activations + self.workspaces + self.graphs


@frozen(kw_only=True)
class MemoryPlan:
    """Bytes by use, and the pages that they give.

    `budget` bounds the sum of all uses; `pool` includes the dummy page.
    """

    free: int
    budget: int
    weights: int
    other_use: MemoryUse
    page: int
    pool: int
    num_pages: int
    page_size: int

    @property
    def kv_tokens(self) -> int:
        """Tokens that the pool holds."""
        return self.num_pages * self.page_size

    def lines(self) -> list[str]:
        """The lines of the start-up print: the arithmetic, and a bar."""
        other = self.other_use
        uses = {
            "weights": self.weights,
            "activations": other.activations,
            "workspaces": other.workspaces,
            "graphs": other.graphs,
            "KV": self.pool,
        }
        arithmetic = " + ".join(
            f"{use} {format_bytes(count)}" for use, count in uses.items() if count
        )
        pool = (
            f"{format_count(self.num_pages, 'page')} of {self.page_size} = "
            f"{format_count(self.kv_tokens, 'token')}"
        )
        return [
            (
                f"memory    {format_bytes(self.free)} free; {arithmetic} = "
                f"{format_bytes(sum(uses.values()))} of {format_bytes(self.budget)}"
            ),
            f"          {draw_memory_bar((self.weights, other.total, self.pool), self.free)}",
            f"KV pool   {pool}, {format_bytes(self.page)} a page",
        ]


def page_bytes(model: ModelConfig, page_size: int, kv_dtype: torch.dtype) -> int:
    """Count the bytes of one page over all layers: K and V of `page_size` tokens."""
    return (
        sum(
            prod(page_shape(group.layout, page_size)) * len(group.layers)
            for group in model.kv_groups
        )
        * kv_dtype.itemsize
    )


def estimate_memory_use(
    model: ModelConfig, tokens: int, rows: int, itemsize: int, kernels: int = 0
) -> MemoryUse:
    """Estimate what the largest step takes where it cannot be measured, as on a CPU.

    It counts the tensors of the widest layer, and float32 logits twice.

    kernels: bytes of what libraries compile while steps run
    """
    heads = (2 * model.heads + 2 * model.kv_heads) * model.head_dim
    width = 2 * model.hidden + max(heads, 3 * model.intermediate)
    return MemoryUse(
        activations=tokens * width * itemsize + rows * model.vocab * 4 * 2, workspaces=kernels
    )


def plan_memory(
    config: EngineConfig,
    *,
    model: ModelConfig,
    page_size: int,
    kv_dtype: torch.dtype,
    weights: int,
    other_use: MemoryUse,
    free: int,
    max_useful_tokens: int,
) -> MemoryPlan:
    """Size the pool by the one setting that fixes its size, or else by the memory ratio.

    `free` is what was free before loading. `max_useful_tokens` is what all rows could fill at
    their longest: a larger pool is of no use.

    raises: CannotRun naming both numbers when it does not fit
    """
    page = page_bytes(model, page_size, kv_dtype)
    # Of what was free before loading, where vLLM's flag means a share of the device's total.
    budget = int(free * config.memory_ratio)
    budget_left = budget - weights - other_use.total
    if config.num_pages is not None:
        pages, flag = config.num_pages, f"--num-pages {config.num_pages}"
    elif config.kv_memory_mb is not None:
        pages, flag = (
            # One page less: this size is in bytes, so the dummy page is within it.
            config.kv_memory_mb * 2**20 // page - 1,
            f"--kv-memory-mb {config.kv_memory_mb}",
        )
    elif config.kv_context_len is not None:
        pages, flag = (
            -(-config.kv_context_len // page_size),
            f"--kv-context-len {config.kv_context_len}",
        )
    else:
        pages, flag = (
            min(budget_left // page - 1, -(-max_useful_tokens // page_size)),
            f"--memory-ratio {config.memory_ratio}",
        )
    uses = f"weights ({format_bytes(weights)}) and activations ({format_bytes(other_use.total)})"
    if pages < 1:
        raise CannotRun(
            f"{flag}: the KV pool needs at least 2 pages of {format_bytes(page)}, and "
            f"{format_bytes(max(budget_left, 0))} are left after {uses}; raise it or lower "
            "--max-batch-tokens"
        )
    room = free - weights - other_use.total
    # One page more than is counted: padding rows write to the dummy page.
    if (pages + 1) * page > room:
        raise CannotRun(
            f"{flag}: the KV pool would take {format_bytes((pages + 1) * page)}, and "
            f"{format_bytes(max(room, 0))} are free after {uses}; ask for less"
        )
    return MemoryPlan(
        free=free,
        budget=budget,
        weights=weights,
        other_use=other_use,
        page=page,
        pool=(pages + 1) * page,
        num_pages=pages,
        page_size=page_size,
    )


def format_bytes(count: int) -> str:
    """Format bytes in the largest unit that gives at least 1."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


def draw_memory_bar(parts: tuple[int, ...], total: int, width: int = 50) -> str:
    """Draw the parts of `total` as a line of marks: weights #, activations =, KV pool +, rest ."""
    marks = ""
    for mark, part in zip("#=+", parts, strict=True):
        marks += mark * round(width * part / max(total, 1))
    return f"[{marks[:width].ljust(width, '.')}]  # weights  = activations  + KV  . free"
