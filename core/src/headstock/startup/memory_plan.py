"""Divide the memory of a device: weights, steps, graphs, and the KV pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from attrs import evolve, frozen

from headstock.config import EngineConfig
from headstock.errors import CannotRun, format_count
from headstock.execution.kv_pools import count_page_bytes
from headstock.scheduler.limits import count_page_tokens, max_row_pages, max_total_pages
from headstock.spi import Experts, KVGroup, LayoutKind, ModelConfig

_FEW_POSITIONS = 128
"""Positions up to which drafts of a step are scored in one part."""

_FEWEST_SNAPSHOTS = 2
"""With fewer, the end of a prompt and of its answer would drop each other."""

MOST_PAGES = 1 << 40
"""More pages than any memory holds."""


@frozen(kw_only=True)
class MemoryUse:
    """Bytes that neither weights nor the pool take.

    `activations` are those of the largest step while it runs, `workspaces` what backends and
    libraries hold. `capturable` is False when graphs were tried and could not be captured.
    `is_kept` is True when an earlier start measured all that.
    """

    activations: int
    workspaces: int = 0
    graphs: int = 0
    capturable: bool = True
    is_kept: bool = False

    @property
    def total(self) -> int:
        """The sum of the three."""
        return self.activations + self.workspaces + self.graphs


@frozen(kw_only=True)
class GroupTerms:
    """The pages of one KV group.

    num_pages: usable ones; the dummy page comes on top
    page_tokens: tokens that a page holds
    page_bytes: of one page over all layers of the group
    num_snapshots: how many of the pages are more than the rows' states, for copies of these
    """

    group: KVGroup
    num_pages: int
    page_tokens: int
    page_bytes: int
    num_snapshots: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes of all pages, the dummy page included."""
        return (self.num_pages + 1) * self.page_bytes

    @property
    def line(self) -> str:
        """The line of the start-up print."""
        layout = self.group.layout.kind.value
        what = layout if self.group.window is None else f"window of {self.group.window}"
        pages = format_count(self.num_pages, "page")
        if self.group.layout.kind is not LayoutKind.STATE:
            pages += f" of {self.page_tokens}"
        if self.num_snapshots:
            pages += f", {format_count(self.num_snapshots, 'snapshot')} among them"
        return (
            f"{what}, {format_count(len(self.group.layers), 'layer')}: {pages}, "
            f"{format_bytes(self.page_bytes)} a page, {format_bytes(self.total_bytes)}"
        )


@frozen(kw_only=True)
class MemoryPlan:
    """Bytes by use, and the pages that they give.

    `budget` bounds the sum of all uses. `kv_tokens` is how many tokens of context the pool has
    pages for. A sequence may have `longest` tokens, which is more where every group has a window.
    """

    free: int
    budget: int
    weights: int
    other_use: MemoryUse
    groups: tuple[GroupTerms, ...]
    page_size: int
    kv_tokens: int
    longest: int

    @property
    def pool(self) -> int:
        """Bytes of the KV pool, dummy pages included."""
        return sum(group.total_bytes for group in self.groups)

    @property
    def num_pages(self) -> tuple[int, ...]:
        """Usable pages by KV group."""
        return tuple(group.num_pages for group in self.groups)

    def lines(self) -> list[str]:
        """The lines of the start-up print: the arithmetic, a bar, and the pages of each group."""
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
        tokens = format_count(self.kv_tokens, "token")
        (first, *others) = self.groups
        if others or first.group.window is not None or first.page_tokens != self.page_size:
            pool = [f"KV pool   {tokens} in {format_count(len(self.groups), 'group')}"]
            pool += [f"          {group.line}" for group in self.groups]
        else:
            pages = format_count(first.num_pages, "page")
            page = format_bytes(first.page_bytes)
            pool = [f"KV pool   {pages} of {self.page_size} = {tokens}, {page} a page"]
        return [
            (
                f"memory    {format_bytes(self.free)} free; {arithmetic} = "
                f"{format_bytes(sum(uses.values()))} of {format_bytes(self.budget)}"
            ),
            f"          {draw_memory_bar(self._bar_parts(), self.free)}",
            *pool,
        ]

    def _bar_parts(self) -> dict[str, int]:
        """Return the bytes of each part of the bar."""
        kv_parts = {"KV": 0, "windows": 0, "states": 0}
        for terms in self.groups:
            is_state = terms.group.layout.kind is LayoutKind.STATE
            part = "KV" if terms.group.retains_all else "states" if is_state else "windows"
            kv_parts[part] += terms.total_bytes
        return {"weights": self.weights, "activations": self.other_use.total, **kv_parts}


def estimate_memory_use(
    model: ModelConfig,
    tokens: int,
    scored: int,
    itemsize: int,
    kernels: int = 0,
    *,
    has_processors: bool = False,
    has_masks: bool = False,
) -> MemoryUse:
    """Estimate what the largest step takes where it cannot be measured, as on a CPU.

    It counts the tensors of the widest layer, and float32 logits twice; six times where logits
    processors change them, and more where masks are unpacked.

    scored: positions whose logits are made at once
    kernels: bytes of what libraries compile while steps run
    """
    sizes = [model.sizes_of(layer) for layer in model.layers]
    heads = max((2 * each.heads + 2 * each.kv_heads) * each.head_dim for each in sizes)
    # Both gates and the input, their product, it again behind the states, a tap's, and the sum.
    channels = max((7 * layer.conv.width for layer in model.layers if layer.conv), default=0)
    # Both maps' rows, the convolution's copies of one, and all in float32 for each value head.
    memories = max((16 * layer.delta.channels for layer in model.layers if layer.delta), default=0)
    inner = 3 * max(each.intermediate for each in sizes)
    experts = max(
        (_count_expert_width(model, layer.experts) for layer in model.layers if layer.experts),
        default=0,
    )
    width = 2 * model.hidden + max(heads, channels, memories, experts, inner)
    score_bytes = scored * model.full_vocab * 4 * 2
    if has_processors:
        # A copy, what a processor makes of it, and as much again for what it works out.
        score_bytes *= 3
    if has_masks:
        # A byte a token for what is banned and half a word for the look-up; and each token of a
        # step whose prompt is scored has a mask.
        score_bytes += scored * model.full_vocab * 3 + tokens * model.full_vocab // 8
    return MemoryUse(activations=tokens * width * itemsize + score_bytes, workspaces=kernels)


def _count_expert_width(model: ModelConfig, experts: Experts) -> int:
    """Count the numbers that a token's experts hold at once."""
    # What each expert is given, what it makes and its place in order, the latter two twice for a
    # moment; between them both gates and their product.
    each = 4 * model.hidden + 3 * experts.intermediate
    # What the dense part gave, and what it is added to.
    beside = 2 * model.hidden if experts.beside_mlp else 0
    return experts.per_token * each + 3 * experts.shared + beside


def count_scored_positions(max_rows: int, max_drafts: int) -> int:
    """Return the maximum number of positions whose logits are computed at once.

    A larger step computes them in parts. The maximum is one a row; with drafts it is larger, so
    that a step of few rows needs one part.
    """
    return max(max_rows, min(max_rows * (max_drafts + 1), _FEW_POSITIONS))


def plan_groups(
    config: EngineConfig,
    groups: Sequence[KVGroup],
    *,
    page_size: int,
    num_pages: int,
    max_len: int,
    kv_dtype: torch.dtype,
    dtype: torch.dtype,
    snapshot_ratio: float = 0.0,
    max_drafts: int = 0,
) -> tuple[GroupTerms, ...]:
    """Give each group the pages for a context of `num_pages * page_size` tokens.

    Full and latent groups keep all of it; a window group no more than all rows can hold at once;
    a state group has a page for each row, and those of snapshots.

    snapshot_ratio: the share of the other groups' pages and the snapshots' that these may take; 0
        for none
    max_drafts: for so many states behind drafts each row has pages too
    """
    terms: list[GroupTerms] = []
    for group in groups:
        page_tokens = count_page_tokens(group, page_size, max_len)
        most = max_total_pages(
            group,
            page_tokens=page_tokens,
            max_rows=config.max_running_requests,
            max_batch_tokens=config.max_batch_tokens,
            max_len=max_len,
            state_pages=1 + max_drafts,
        )
        is_state = group.layout.kind is LayoutKind.STATE
        bounded = most if is_state else num_pages if group.retains_all else min(num_pages, most)
        terms.append(
            GroupTerms(
                group=group,
                num_pages=bounded,
                page_tokens=page_tokens,
                page_bytes=count_page_bytes(group, page_tokens, kv_dtype, dtype)
                * len(group.layers),
            )
        )
    return tuple(_add_snapshots(terms, num_pages, snapshot_ratio))


def _add_snapshots(terms: list[GroupTerms], num_pages: int, ratio: float) -> list[GroupTerms]:
    """Add the pages of snapshots, equally many for each group that keeps a state.

    num_pages: of a context; more snapshots would stand for no prefixes
    """
    states = [each for each in terms if each.group.layout.kind is LayoutKind.STATE]
    if not ratio or not states:
        return terms
    tokens = sum(each.total_bytes for each in terms if each not in states)
    most = int(ratio / (1 - ratio) * tokens) // sum(each.page_bytes for each in states)
    count = max(min(most, num_pages), _FEWEST_SNAPSHOTS)
    return [
        evolve(each, num_pages=each.num_pages + count, num_snapshots=count)
        if each in states
        else each
        for each in terms
    ]


def plan_memory(
    config: EngineConfig,
    *,
    model: ModelConfig,
    page_size: int,
    kv_dtype: torch.dtype,
    dtype: torch.dtype,
    weights: int,
    other_use: MemoryUse,
    free: int,
    max_len: int,
    snapshot_ratio: float = 0.0,
    max_drafts: int = 0,
) -> MemoryPlan:
    """Size the pool by the one setting that fixes its size, or else by the memory ratio.

    The settings count tokens of context, or pages of `page_size` tokens. `free` is what was free
    before loading. A pool larger than all rows could fill at their longest is of no use.

    raises: CannotRun naming both numbers when it does not fit
    """

    def make_groups(count: int) -> tuple[GroupTerms, ...]:
        return plan_groups(
            config,
            model.kv_groups,
            page_size=page_size,
            num_pages=count,
            max_len=max_len,
            kv_dtype=kv_dtype,
            dtype=dtype,
            snapshot_ratio=snapshot_ratio,
            max_drafts=max_drafts,
        )

    def count_bytes(count: int) -> int:
        return sum(group.total_bytes for group in make_groups(count))

    # Of what was free before loading, where vLLM's flag means a share of the device's total.
    budget = int(free * config.memory_ratio)
    budget_left = budget - weights - other_use.total
    most_useful = -(-config.max_running_requests * max_len // page_size)
    if config.num_pages is not None:
        pages, flag = config.num_pages, f"num_pages (--num-pages) {config.num_pages}"
    elif config.kv_memory_mb is not None:
        # This size is in bytes, so the dummy pages are within it.
        pages, flag = (
            find_most_pages(config.kv_memory_mb * 2**20, count_bytes, MOST_PAGES),
            f"kv_memory_mb (--kv-memory-mb) {config.kv_memory_mb}",
        )
    elif config.kv_context_len is not None:
        pages, flag = (
            -(-config.kv_context_len // page_size),
            f"kv_context_len (--kv-context-len) {config.kv_context_len}",
        )
    else:
        pages, flag = (
            find_most_pages(budget_left, count_bytes, most_useful),
            f"memory_ratio (--memory-ratio) {config.memory_ratio}",
        )
    uses = f"weights ({format_bytes(weights)}) and activations ({format_bytes(other_use.total)})"
    if pages < 1:
        least = make_groups(1)
        lower = "max_batch_tokens (--max-batch-tokens)"
        if any(each.group.layout.kind is LayoutKind.STATE for each in least):
            lower += " or max_running_requests (--max-running-requests)"
        smallest = (
            f"2 pages of {format_bytes(least[0].page_bytes)}"
            if len(least) == 1
            else format_bytes(count_bytes(1))
        )
        raise CannotRun(
            f"{flag}: the KV pool needs at least {smallest}, and "
            f"{format_bytes(max(budget_left, 0))} are left after {uses}; raise it or lower {lower}"
        )
    room = free - weights - other_use.total
    groups = make_groups(pages)
    pool = sum(group.total_bytes for group in groups)
    if pool > room:
        raise CannotRun(
            f"{flag}: the KV pool would take {format_bytes(pool)}, and "
            f"{format_bytes(max(room, 0))} are free after {uses}; ask for less"
        )
    return MemoryPlan(
        free=free,
        budget=budget,
        weights=weights,
        other_use=other_use,
        groups=groups,
        page_size=page_size,
        kv_tokens=pages * page_size,
        longest=_find_longest(config, groups, model.max_position),
    )


def find_most_pages(room: int, count_bytes: Callable[[int], int], most: int) -> int:
    """Find the largest count up to `most` whose bytes fit into `room`; 0 when none does."""
    fits, too_many = 0, most + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if count_bytes(middle) <= room:
            fits = middle
        else:
            too_many = middle
    return fits


def _find_longest(config: EngineConfig, groups: Sequence[GroupTerms], most: int) -> int:
    """Find how many tokens, up to `most`, a sequence may have that has the pool to itself."""
    longest = most
    for terms in groups:
        if terms.group.layout.kind is LayoutKind.STATE:
            continue  # one page, whatever the length
        need = max_row_pages(terms.group, most, terms.page_tokens, config.max_batch_tokens)
        if need > terms.num_pages:
            longest = min(longest, terms.num_pages * terms.page_tokens)
    return longest


def format_bytes(count: int) -> str:
    """Format bytes in the largest unit that gives at least 1."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


_MARKS = {"weights": "#", "activations": "=", "KV": "+", "windows": "~", "states": "*"}
"""The mark of each part of the memory bar."""


def draw_memory_bar(parts: Mapping[str, int], total: int, width: int = 50) -> str:
    """Draw the parts of `total` as a line of marks, with a legend of those that are there."""
    marks = "".join(
        _MARKS[name] * round(width * part / max(total, 1)) for name, part in parts.items()
    )
    legend = "  ".join(f"{_MARKS[name]} {name}" for name, part in parts.items() if part)
    return f"[{marks[:width].ljust(width, '.')}]  {legend}  . free"
