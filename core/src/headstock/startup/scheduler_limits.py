"""Make the scheduler's limits from the configuration, the terms and the memory plan."""

from __future__ import annotations

import attrs

from headstock import registry
from headstock.config import EngineConfig
from headstock.debug.watched_cache import WatchedPolicy
from headstock.errors import CannotRun
from headstock.scheduler import Limits
from headstock.selection.auto_choices import OVERLAP
from headstock.selection.negotiate import Terms
from headstock.selection.select import SelectedPlugins
from headstock.spi import CachePolicy, ModelConfig
from headstock.startup.memory_plan import MemoryPlan


def make_limits(
    config: EngineConfig,
    parts: SelectedPlugins,
    terms: Terms,
    memory: MemoryPlan,
    model: ModelConfig,
    max_len: int,
    device: str,
) -> Limits:
    """Make the scheduler's limits.   raises: CannotRun"""
    return Limits(
        max_rows=config.max_running_requests,
        max_batch_tokens=config.max_batch_tokens,
        max_len=max_len,
        page_size=memory.page_size,
        num_pages=memory.num_pages,
        groups=model.kv_groups,
        schedule=registry.make_schedule(parts.scheduler, config.opt),
        scheduler=parts.scheduler.name,
        policy=_make_cache_policy(config, parts, memory, model) if terms.reuse else None,
        cache=parts.cache.name,
        recompute=not config.kv_cache,
        max_regions=_region_limit(config, memory) if terms.take_over else 0,
        overlap=OVERLAP[device] if config.overlap is None else config.overlap,
        max_drafts=parts.max_drafts,
        alignment=terms.alignment,
        snapshot_tokens=terms.snapshot_tokens,
        check=config.debug_invariants,
        length_hint=_explain_max_len(config, memory, model, max_len),
    )


def _explain_max_len(
    config: EngineConfig, memory: MemoryPlan, model: ModelConfig, max_len: int
) -> str:
    """Explain how a sequence may have more than `max_len` tokens, as the end of an error text."""
    if max_len >= model.max_position:
        return ": the model itself allows no more"
    if max_len >= memory.longest:
        sizes = {
            "num_pages (--num-pages)": config.num_pages,
            "kv_memory_mb (--kv-memory-mb)": config.kv_memory_mb,
            "kv_context_len (--kv-context-len)": config.kv_context_len,
        }
        stated = [flag for flag, value in sizes.items() if value is not None]
        return (
            " or enlarge the KV pool with "
            f"{stated[0] if stated else 'memory_ratio (--memory-ratio)'}"
        )
    return (
        f" or raise max_seq_len (--max-seq-len), which the model allows up to {model.max_position}"
    )


def _make_cache_policy(
    config: EngineConfig, parts: SelectedPlugins, memory: MemoryPlan, model: ModelConfig
) -> CachePolicy:
    """Make the cache policy, bounded by `--prefix-cache-n`.

    raises: CannotRun when it cannot be bounded
    """
    options = registry.make_options(parts.cache, config.opt)
    if config.prefix_cache_n is not None:
        # By the field's name: the contract of cache policies knows no bound.
        if options is None or "max_prefixes" not in attrs.fields_dict(type(options)):
            raise CannotRun(
                "prefix_cache_n (--prefix-cache-n): cache_type (--cache-type) "
                f"{parts.cache.name} cannot bound its prefixes; leave it out"
            )
        options = attrs.evolve(options, max_prefixes=config.prefix_cache_n)
    policy: CachePolicy = registry.make_part(
        parts.cache, CachePolicy, memory.page_size, model.kv_groups, options
    )
    if config.debug_invariants:
        num_groups = len(model.kv_groups)
        return WatchedPolicy(policy, parts.cache.name, num_groups, memory.page_size)
    return policy


def _region_limit(config: EngineConfig, memory: MemoryPlan) -> int:
    """How many regions of ended sequences are kept: as many as fit, or `--prefix-cache-n`."""
    most = min(memory.num_pages)
    return most if config.prefix_cache_n is None else min(config.prefix_cache_n, most)
