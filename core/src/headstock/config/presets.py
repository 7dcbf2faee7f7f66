"""Named sets of values for common purposes; file, environment and flags win over them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from headstock.errors import UsageError, shorten, suggest_name

PRESETS: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "max-throughput": {
            "max_batch_tokens": 16384,
            "max_running_requests": 256,
            "cuda_graph_max_bs": 256,
            "memory_ratio": 0.9,
        },
        "low-latency": {
            "max_running_requests": 8,
            "max_queued_requests": 64,
            "max_batch_tokens": 1024,
            "memory_threshold": 0.8,
            "cuda_graph_max_bs": 8,
        },
        "memory-constrained": {
            "memory_ratio": 0.7,
            "cuda_graph_max_bs": 64,
            "max_batch_tokens": 4096,
            "page_size": 16,
            "max_running_requests": 16,
        },
        "long-context": {
            "max_seq_len": 32768,
            "max_seq_len_or_less": True,
            "max_batch_tokens": 16384,
            # The length and the page size are wishes: what the model and the plugins allow less of
            # is cut.
            "page_size": 256,
            "page_size_or_less": True,
            "memory_ratio": 0.95,
            "max_running_requests": 16,
        },
        # Without graphs and overlap an error shows in the step that made it.
        "debug": {
            "runner": "eager",
            "overlap": False,
            "cuda_graph_max_bs": 0,
            "debug_invariants": True,
            "log_level": "DEBUG",
        },
    }
)
"""Preset -> field of EngineConfig -> value."""


def find_preset(name: str, where: str) -> Mapping[str, object]:
    """The values of the preset `name`; an error begins with `where` it was named.

    raises: UsageError
    """
    if name not in PRESETS:
        raise UsageError(
            f"{where}: expected one of {', '.join(PRESETS)}, got {shorten(name)}"
            f"{suggest_name(shorten(name), PRESETS)}"
        )
    return PRESETS[name]
