"""Rules between configuration values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from headstock.errors import UsageError

if TYPE_CHECKING:
    from headstock.config.engine import EngineConfig

DEFAULT_MEMORY_RATIO = 0.9

POOL_SIZES = ("num_pages", "memory_ratio", "kv_memory_mb", "kv_context_len")
"""The fields that size the KV pool, of which one is enough."""


def check_pool_sizes(config: EngineConfig) -> None:
    """Raise UsageError when more than one size of the pool is set."""
    given: dict[str, object] = {
        flag: value
        for flag, value in (
            ("--num-pages", config.num_pages),
            ("--kv-memory-mb", config.kv_memory_mb),
            ("--kv-context-len", config.kv_context_len),
            ("--memory-ratio", None if config.memory_ratio == DEFAULT_MEMORY_RATIO else config.memory_ratio),
        )
        if value is not None
    }
    if len(given) > 1:
        raise UsageError(two_sizes(given))


def two_sizes(given: Mapping[str, object]) -> str:
    """What to say when several pool sizes are given; flag -> value."""
    said = " and ".join(f"{flag} {value}" for flag, value in given.items())
    return f"{said}: give at most one of --num-pages, --memory-ratio, --kv-memory-mb, --kv-context-len"


def check_lengths(config: EngineConfig) -> None:
    """Raise UsageError when a length is below what it must hold at least."""
    size = 0 if config.page_size_or_less or not isinstance(config.page_size, int) else config.page_size
    if config.max_seq_len is not None and config.max_seq_len < size:
        raise UsageError(f"--max-seq-len {config.max_seq_len}: max_seq_len must be at least page_size ({size})")
    if config.max_batch_tokens < config.max_running_requests:
        raise UsageError(
            f"--max-batch-tokens {config.max_batch_tokens}: max_batch_tokens must be at least max_running_requests "
            f"({config.max_running_requests}); a step gives each running request one token or more"
        )
