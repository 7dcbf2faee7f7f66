"""Negotiate the terms that all parts of an engine share, before weights load."""

from __future__ import annotations

from math import lcm

from attrs import frozen

from headstock.config import EngineConfig
from headstock.errors import CannotRun, format_count
from headstock.selection import auto_choices
from headstock.selection.attention_choice import join_capabilities
from headstock.selection.model_needs import resolve_kv_dtype
from headstock.selection.select import SelectedPlugins
from headstock.spi import (
    DeviceEnv,
    IntSet,
    KVGroup,
    LayoutKind,
    ModelConfig,
    Phase,
    StateKV,
)


@frozen(kw_only=True)
class Terms:
    """The terms, and which part set each of them.

    `table` has (term, value, what constrained it) for the start-up print. With `reuse`, prefixes
    are shared page by page; with `take_over`, regions of ended sequences are kept for those that
    go on. `alignment` and `snapshot_tokens` are those of `Limits`.
    """

    dtype: str
    kv_dtype: str
    page_size: int
    contiguous: bool
    reuse: bool
    take_over: bool
    alignment: int
    snapshot_tokens: int
    table: tuple[tuple[str, str, str], ...]


def negotiate_terms(
    config: EngineConfig, parts: SelectedPlugins, model: ModelConfig, dtype: str, env: DeviceEnv
) -> Terms:
    """Negotiate the terms that every part can serve.

    raises: CannotRun naming which part rules what out
    """
    contiguous = config.paged_attn == "off"
    claims: dict[str, IntSet] = {}
    for choice in parts.attention:
        who = f"attn (--attn) {choice.spec.name}"
        # A backend that serves KV groups of one shape alone is there once for each shape.
        if who in claims:
            who += f" for KV groups {', '.join(map(str, choice.groups))}"
        claims[who] = choice.capabilities.page_sizes
    claims[f"cache_type (--cache-type) {parts.cache.name}"] = parts.cache.capabilities.page_sizes
    # A contiguous region is one page as long as the longest sequence, so no part limits its size
    # (docs/decisions/0008-contiguous-mode.md).
    page_size = 0 if contiguous else agree_page_size(config, claims, env)
    against = _find_reuse_obstacle(config, parts) or _find_group_obstacle(
        config, model, parts, contiguous=contiguous
    )
    alignment = _find_alignment(config, model)
    keeps_state = any(group.layout.kind is LayoutKind.STATE for group in model.kv_groups)
    snapshot_tokens = 0
    if keeps_state and not against and not contiguous:
        step = lcm(alignment, page_size)
        snapshot_tokens = -(-config.snapshot_tokens // step) * step
    narrowing = [
        who
        for who, sizes in claims.items()
        if sizes != IntSet.all() and page_size != config.page_size
    ]
    storage = (
        str(page_size),
        ", ".join(narrowing) or (f"page_size (--page-size) {config.page_size}"),
    )
    sharing = ("on", f"cache_type (--cache-type) {parts.cache.name}")
    if contiguous:
        storage, sharing = (
            ("one region each", "paged_attn (--paged-attn) off"),
            ("of whole sequences", "paged_attn (--paged-attn) off"),
        )
    kv_dtype = resolve_kv_dtype(config.kv_dtype, dtype)
    decode = join_capabilities(parts.attention, Phase.DECODE)
    return Terms(
        dtype=dtype,
        kv_dtype=kv_dtype,
        page_size=page_size,
        contiguous=contiguous,
        reuse=not against and not contiguous,
        take_over=not against and contiguous,
        alignment=alignment,
        snapshot_tokens=snapshot_tokens,
        table=(
            ("device", f"{env.name}", f"device (--device) {config.device}"),
            ("dtype", dtype, f"dtype (--dtype) {config.dtype}"),
            ("KV dtype", kv_dtype, f"kv_dtype (--kv-dtype) {config.kv_dtype}"),
            ("page size", *storage),
            ("prefix reuse", *(("off", against) if against else sharing)),
            (
                "graphs",
                decode.graph.name.lower(),
                f"attn (--attn) {decode.names}",
            ),
        ),
    )


def _find_reuse_obstacle(config: EngineConfig, parts: SelectedPlugins) -> str:
    """Find the flag that forbids to reuse what another request computed; empty when none does."""
    if not config.kv_cache:
        return "kv_cache (--kv-cache) off"
    if config.prefix_cache_n == 0:
        return "prefix_cache_n (--prefix-cache-n) 0"
    return "" if parts.cache.capabilities.reuse else f"cache_type (--cache-type) {parts.cache.name}"


def _find_alignment(config: EngineConfig, model: ModelConfig) -> int:
    """Find at multiples of how many tokens chunks of prompts end; 1 for anywhere."""
    alignment = lcm(*(_get_alignment(group) or 1 for group in model.kv_groups))
    # Beside all rows' next tokens, a step must have room for a chunk.
    room = config.max_batch_tokens - config.max_running_requests
    return alignment if alignment <= room else 1


def _get_alignment(group: KVGroup) -> int | None:
    """Return the alignment of a group's state; None where it keeps none, or promises none."""
    return group.layout.alignment if isinstance(group.layout, StateKV) else None


def _find_group_obstacle(
    config: EngineConfig, model: ModelConfig, parts: SelectedPlugins, *, contiguous: bool
) -> str:
    """Find the KV group that cannot resume what another request computed; empty when all can."""
    for number, group in enumerate(model.kv_groups):
        # It has taken in every token of its sequence, and cannot go back to where two part.
        if group.layout.kind is LayoutKind.STATE and (
            fault := _find_snapshot_obstacle(config, group, contiguous=contiguous)
        ):
            return f"KV group {number} keeps a state: {fault}"
        if contiguous:
            continue  # a region has every token, and no cache policy sees it
        if group.window is not None and not parts.cache.capabilities.windows:
            return f"cache_type (--cache-type) {parts.cache.name} with a window of {group.window}"
        if group.layout.kind not in parts.cache.capabilities.layouts:
            return f"cache_type (--cache-type) {parts.cache.name} with {group.layout.kind.value} KV"
    return ""


def _find_snapshot_obstacle(config: EngineConfig, group: KVGroup, *, contiguous: bool) -> str:
    """Find why a group's states are not copied for other requests; empty when they are."""
    alignment = _get_alignment(group)
    if contiguous:
        return "paged_attn (--paged-attn) off"
    if alignment is None:
        return "its family names no alignment"
    if not config.snapshot_tokens:
        return "snapshot_tokens (--snapshot-tokens) 0"
    if not config.snapshot_ratio:
        return "snapshot_ratio (--snapshot-ratio) 0"
    most, rows = config.max_batch_tokens, config.max_running_requests
    if alignment > most - rows:
        return (
            f"max_batch_tokens (--max-batch-tokens) {most} has no room for "
            f"{format_count(alignment, 'token')} beside those of max_running_requests "
            f"(--max-running-requests) {rows}"
        )
    return ""


def agree_page_size(config: EngineConfig, claims: dict[str, IntSet], env: DeviceEnv) -> int:
    """Agree on the requested page size; for `auto` on the first that every part serves.

    raises: CannotRun
    """
    requested = config.page_size
    if isinstance(requested, int) and not config.page_size_or_less:
        for who, sizes in claims.items():
            if requested not in sizes:
                raise CannotRun(
                    f"page_size (--page-size) {requested}: {who} serves {sizes}; choose one "
                    "of those"
                )
        return requested
    # For `auto` the best size of the device comes first, then the others in a fixed order.
    candidates: tuple[int, ...] = (
        auto_choices.PAGE_SIZES[env.device],
        *auto_choices.OTHER_PAGE_SIZES,
    )
    if isinstance(requested, int):
        # --page-size-or-less: the largest size below the requested one
        candidates = tuple(range(requested, 0, -1))
    for size in candidates:
        if all(size in sizes for sizes in claims.values()):
            return size
    rules = "; ".join(f"{who} serves {sizes}" for who, sizes in claims.items())
    raise CannotRun(f"no page size is supported by all selected plugins: {rules}")
