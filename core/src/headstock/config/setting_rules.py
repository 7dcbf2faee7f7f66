"""Rules between configuration values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headstock.errors import UsageError

if TYPE_CHECKING:
    from headstock.config.engine import EngineConfig

DEFAULT_MEMORY_RATIO = 0.9

POOL_SIZES = ("num_pages", "memory_ratio", "kv_memory_mb", "kv_context_len")
"""The fields that size the KV pool, of which one is enough."""


def check_pool_sizes(config: EngineConfig) -> None:
    """Raise UsageError when more than one size of the pool is set."""
    unset = {"memory_ratio": DEFAULT_MEMORY_RATIO}
    sizes = {name: getattr(config, name) for name in POOL_SIZES}
    given = [
        f"{make_size_flag(name)} {size}" for name, size in sizes.items() if size != unset.get(name)
    ]
    if len(given) > 1:
        raise UsageError(describe_size_conflict(given))


def describe_size_conflict(source_text: Sequence[str]) -> str:
    """What to say when several pool sizes are given; `source_text` is how each was put."""
    return (
        f"{' and '.join(source_text)}: give at most one of "
        f"{', '.join(map(make_size_flag, POOL_SIZES))}"
    )


def make_size_flag(name: str) -> str:
    """The flag of a pool size."""
    return "--" + name.replace("_", "-")


def check_lengths(config: EngineConfig) -> None:
    """Raise UsageError when a length is below what it must hold at least."""
    size = (
        0 if config.page_size_or_less or not isinstance(config.page_size, int) else config.page_size
    )
    if config.max_seq_len is not None and config.max_seq_len < size:
        raise UsageError(
            f"--max-seq-len {config.max_seq_len}: max_seq_len must be at least page_size ({size})"
        )
    if config.max_batch_tokens < config.max_running_requests:
        raise UsageError(
            f"--max-batch-tokens {config.max_batch_tokens}: max_batch_tokens must be at least "
            f"max_running_requests ({config.max_running_requests}); a step gives each running "
            "request one token or more"
        )
