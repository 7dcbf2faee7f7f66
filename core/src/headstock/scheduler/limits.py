"""Sizes and policies that never change while an engine runs."""

from __future__ import annotations

from math import lcm

import numpy as np
from attrs import field, frozen

from headstock.scheduler.request import Request
from headstock.scheduler.row_counters import read_only
from headstock.spi.arrays import Ints
from headstock.spi.cache import CachePolicy
from headstock.spi.kv import KVGroup, LayoutKind
from headstock.spi.scheduler import ScheduleFunction

_IN_FLIGHT = 16
"""Placeholders and drafts by which a row may be ahead of its known tokens."""

MAX_DRAFTS = _IN_FLIGHT - 1
"""The maximum drafts that a row may verify in a step, for which a window's pages have room."""


def count_page_tokens(group: KVGroup, page_size: int, max_len: int) -> int:
    """Return how many tokens a page of the group holds; one page holds the state of any number."""
    # So a state counts as a page like any other, without a separate rule.
    return max_len if group.layout.kind is LayoutKind.STATE else page_size


def count_kept_pages(group: KVGroup, num_tokens: int, page_tokens: int) -> int:
    """Return how many pages of the group a sequence of `num_tokens` keeps between steps."""
    pages = -(-num_tokens // page_tokens)
    if group.window is None:
        return pages
    # One page more, since a window need not begin at a page.
    return min(pages, -(-(group.window - 1 + _IN_FLIGHT) // page_tokens) + 1)


def max_row_pages(group: KVGroup, num_tokens: int, page_tokens: int, max_batch_tokens: int) -> int:
    """Return how many pages of the group a sequence of `num_tokens` ever holds at once."""
    pages = -(-num_tokens // page_tokens)
    if group.window is None:
        return pages
    # The step's chunk gets its pages before those behind the window are freed, one step later. It
    # need not begin at a page either.
    kept = count_kept_pages(group, num_tokens, page_tokens)
    return min(pages, kept + -(-max_batch_tokens // page_tokens) + 1)


def max_total_pages(
    group: KVGroup,
    *,
    page_tokens: int,
    max_rows: int,
    max_batch_tokens: int,
    max_len: int,
    state_pages: int = 1,
) -> int:
    """Return how many pages of the group all rows ever hold at once, without shared ones.

    state_pages: those of a row where the group keeps a state
    """
    if group.layout.kind is LayoutKind.STATE:
        return max_rows * state_pages
    longest = max_rows * -(-max_len // page_tokens)
    if group.window is None:
        return longest
    # What a step adds is one chunk for all rows together, and a page that is not full for each.
    kept = count_kept_pages(group, max_len, page_tokens)
    return min(longest, max_rows * (kept + 1) + -(-max_batch_tokens // page_tokens))


@frozen(kw_only=True, eq=False)
class Limits:
    """The sizes and policies of one engine.

    num_pages: usable pages of each KV group; page 0, the dummy page, comes on top
    max_len: tokens of the longest sequence
    scheduler, cache: names of the plugins, for errors
    policy: the prefix index, None when nothing is shared
    recompute: every step computes all tokens of its rows again
    max_regions: regions of ended sequences to keep in contiguous mode
    overlap: the plan before last may still run when the next is made
    max_drafts: the most drafts of a row in a step; 0 when nothing proposes any
    alignment: chunks of a prompt end at multiples of so many tokens; 1 for anywhere
    snapshot_tokens: after how many tokens of a prompt its states are copied for others; 0 for never
    length_hint: the part of an error that says how to allow longer sequences
    page_tokens: by KV group, the tokens that one page holds; `page_token_column` has the same as
        [groups, 1] int32
    max_kept_pages: by KV group, the most pages that a row keeps between steps
    scarce_groups: the groups with fewer pages than the rows could hold together
    state_groups: the groups that keep a state
    state_pages: pages of a row in each of these: its state, and those behind tokens whose drafts
        may be rejected
    no_drafts: [max_rows] int32 zeros, of a step in which no row has drafts
    ones: [max_rows] int32, pages by row of a step in which rows lack one each
    """

    max_rows: int
    max_batch_tokens: int
    max_len: int
    page_size: int
    num_pages: tuple[int, ...]
    groups: tuple[KVGroup, ...]
    schedule: ScheduleFunction
    scheduler: str
    policy: CachePolicy | None = None
    cache: str = ""
    recompute: bool = False
    max_regions: int = 0
    overlap: bool = False
    max_drafts: int = 0
    alignment: int = 1
    snapshot_tokens: int = 0
    check: bool = False
    length_hint: str = " or raise max_seq_len (--max-seq-len)"
    # Worked out once: steps read them for every row.
    page_tokens: tuple[int, ...] = field(init=False)
    max_kept_pages: tuple[int, ...] = field(init=False)
    page_token_column: Ints = field(init=False, repr=False)
    scarce_groups: tuple[int, ...] = field(init=False)
    state_groups: tuple[int, ...] = field(init=False)
    state_pages: int = field(init=False)
    no_drafts: Ints = field(init=False, repr=False)
    ones: Ints = field(init=False, repr=False)

    @page_tokens.default
    def _count_page_tokens(self) -> tuple[int, ...]:
        return tuple(
            count_page_tokens(group, self.page_size, self.max_len) for group in self.groups
        )

    @max_kept_pages.default
    def _count_kept_pages(self) -> tuple[int, ...]:
        return tuple(
            count_kept_pages(group, self.max_len, page_tokens)
            for group, page_tokens in zip(self.groups, self.page_tokens, strict=True)
        )

    @page_token_column.default
    def _make_page_token_column(self) -> Ints:
        return read_only(np.array(self.page_tokens, np.int32)[:, None])

    @scarce_groups.default
    def _find_scarce_groups(self) -> tuple[int, ...]:
        return tuple(
            number
            for number, (group, page_tokens) in enumerate(
                zip(self.groups, self.page_tokens, strict=True)
            )
            if self.num_pages[number]
            < max_total_pages(
                group,
                page_tokens=page_tokens,
                max_rows=self.max_rows,
                max_batch_tokens=self.max_batch_tokens,
                max_len=self.max_len,
                state_pages=1 + self.max_drafts,
            )
        )

    @state_groups.default
    def _find_state_groups(self) -> tuple[int, ...]:
        return tuple(
            number
            for number, group in enumerate(self.groups)
            if group.layout.kind is LayoutKind.STATE
        )

    @state_pages.default
    def _count_state_pages(self) -> int:
        return 1 + self.max_drafts

    @no_drafts.default
    def _make_no_drafts(self) -> Ints:
        return read_only(np.zeros(self.max_rows, np.int32))

    @ones.default
    def _make_ones(self) -> Ints:
        return read_only(np.ones(self.max_rows, np.int32))

    @property
    def keeps_state(self) -> bool:
        """Whether some layers keep a state, which cannot go back to an earlier token."""
        return bool(self.state_groups)

    @property
    def snapshot_step(self) -> int:
        """Multiples of how many tokens a snapshot may be at: of pages, and of the alignment."""
        return lcm(self.alignment, self.page_size)

    def pages_for(self, num_tokens: int) -> int:
        """Return how many pages of `page_size` tokens hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def max_pages(self, group: int, num_tokens: int) -> int:
        """Return how many pages of `group` a sequence of `num_tokens` ever holds at once."""
        if group in self.state_groups:
            return self.state_pages
        return max_row_pages(
            self.groups[group], num_tokens, self.page_tokens[group], self.max_batch_tokens
        )

    def pages_by_group(self, num_tokens: int) -> Ints:
        """Return how many pages of each group a sequence of `num_tokens` keeps, [groups] int64."""
        return np.array(
            [
                self.state_pages
                if number in self.state_groups
                else count_kept_pages(group, num_tokens, page_tokens)
                for number, (group, page_tokens) in enumerate(
                    zip(self.groups, self.page_tokens, strict=True)
                )
            ]
        )

    def largest_share(self, pages: Ints) -> float:
        """Return the share that `pages` are of a group's, in the group where it is largest.

        Groups with a window or a state that always have room do not count.
        pages: [groups]
        """
        shares = [
            int(count) / total
            for number, (count, total, group) in enumerate(
                zip(pages, self.num_pages, self.groups, strict=True)
            )
            if group.retains_all or number in self.scarce_groups
        ]
        return max(shares, default=0.0)


def find_refusal(request: Request, limits: Limits) -> str | None:
    """Return why the request can never run, naming both numbers, or None when it can."""
    length = len(request.prompt)
    if length < 1:
        return "the prompt is empty; give at least one token"
    if request.max_tokens < 1 and not request.pooling:
        return f"max_tokens: expected 1 or more, got {request.max_tokens}"
    if length >= limits.max_len and not request.pooling:
        return (
            f"the prompt has {length} tokens and one more must fit, but a sequence may have "
            f"{limits.max_len}; shorten it{limits.length_hint}"
        )
    if length > limits.max_len:
        return (
            f"the prompt has {length} tokens, but a sequence may have {limits.max_len}; "
            f"shorten it{limits.length_hint}"
        )
    if request.max_len > limits.max_len:
        return (
            f"{length} prompt tokens and {request.max_tokens} to generate make {request.max_len}, "
            f"but a sequence may have {limits.max_len}; lower max_tokens{limits.length_hint}"
        )
    for group, total in enumerate(limits.num_pages):
        need = limits.max_pages(group, request.max_computed)
        if need > total:
            shorter = "shorten it" if request.pooling else "lower max_tokens"
            return (
                f"the request needs {need} pages of {limits.page_tokens[group]} tokens, but the "
                f"pool has {total}; {shorter} or raise num_pages (--num-pages)"
            )
    return None
