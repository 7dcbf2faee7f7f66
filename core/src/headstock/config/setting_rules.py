"""Rules between settings. They take plain values, so that the settings' class can import them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headstock.errors import UsageError, name_setting

DEFAULT_MEMORY_RATIO = 0.9

POOL_SIZES = ("num_pages", "memory_ratio", "kv_memory_mb", "kv_context_len")
"""The settings that size the KV pool; one of them is enough."""


def check_pool_sizes(sizes: Mapping[str, object]) -> None:
    """Raise UsageError when more than one of `sizes`, a value for each of POOL_SIZES, is set."""
    # The ratio alone is never None, so its default counts as not given.
    unset = {"memory_ratio": DEFAULT_MEMORY_RATIO}
    texts = [
        f"{name_setting(name)} {size}" for name, size in sizes.items() if size != unset.get(name)
    ]
    if len(texts) > 1:
        raise UsageError(describe_size_conflict(texts))


def describe_size_conflict(texts: Sequence[str]) -> str:
    """The error for several pool sizes; `texts` say where each was given, and the value."""
    return f"expected at most one of {', '.join(POOL_SIZES)}, got {' and '.join(texts)}"


def check_sequence_length(
    max_seq_len: int | None, page_size: int | str, *, page_size_or_less: bool
) -> None:
    """Raise UsageError when the longest sequence is shorter than a page.

    A page size that is "auto", or that may still shrink, sets no limit.
    """
    if page_size_or_less or not isinstance(page_size, int):
        return
    if max_seq_len is not None and max_seq_len < page_size:
        raise UsageError(
            f"{name_setting('max_seq_len')}: expected {name_setting('page_size')} {page_size} or "
            f"more, got {max_seq_len}"
        )


def check_step_tokens(max_batch_tokens: int, max_running_requests: int) -> None:
    """Raise UsageError when a step has fewer tokens than running requests."""
    if max_batch_tokens < max_running_requests:
        raise UsageError(
            f"{name_setting('max_batch_tokens')}: expected {name_setting('max_running_requests')} "
            f"{max_running_requests} or more, got {max_batch_tokens}; a step gives each running "
            "request one token or more"
        )
