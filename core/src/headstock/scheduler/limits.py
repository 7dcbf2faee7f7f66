"""Sizes and policies that never change while an engine runs."""

from __future__ import annotations

from attrs import frozen

from headstock.scheduler.request import Request
from headstock.spi.cache import CachePolicy
from headstock.spi.kv import KVGroup
from headstock.spi.scheduler import ScheduleFunction

_IN_FLIGHT = 16
"""Placeholders and drafts by which a row may be ahead of its known tokens."""


@frozen(kw_only=True, eq=False)
class Limits:
    """The sizes and policies of one engine.

    num_pages: usable pages of each KV group; page 0, the dummy page, comes on top
    max_len: tokens of the longest sequence
    scheduler: name of the scheduler plugin, for errors
    policy: the prefix index, None when nothing is shared
    recompute: every step computes all tokens of its rows again
    max_regions: regions of ended sequences to keep in contiguous mode
    overlap: the plan before last may still run when the next is made
    length_hint: the part of an error that says how to allow longer sequences
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
    recompute: bool = False
    max_regions: int = 0
    overlap: bool = False
    check: bool = False
    length_hint: str = " or raise --max-seq-len"

    def pages_for(self, num_tokens: int) -> int:
        """Return how many pages hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def max_pages(self, group: int, num_tokens: int) -> int:
        """Return how many pages of `group` a sequence of `num_tokens` ever holds at once."""
        pages = self.pages_for(num_tokens)
        window = self.groups[group].window
        if window is None:
            return pages
        # The step's chunk gets its pages before those behind the window are freed, one step later.
        # One page more, since a window need not begin at a page.
        return min(pages, self.pages_for(window + self.max_batch_tokens + _IN_FLIGHT) + 1)


def find_refusal(request: Request, limits: Limits) -> str | None:
    """Return why the request can never run, naming both numbers, or None when it can."""
    length = len(request.prompt)
    if length < 1:
        return "the prompt is empty; give at least one token"
    if request.max_tokens < 1:
        return f"max_tokens is {request.max_tokens}; it must be at least 1"
    if length >= limits.max_len:
        return (
            f"the prompt has {length} tokens and one more must fit, but a sequence may have "
            f"{limits.max_len}; shorten it{limits.length_hint}"
        )
    if request.max_len > limits.max_len:
        return (
            f"{length} prompt tokens and {request.max_tokens} to generate make {request.max_len}, "
            f"but a sequence may have {limits.max_len}; lower max_tokens{limits.length_hint}"
        )
    for group, total in enumerate(limits.num_pages):
        # The last token is never computed, so it needs no slot.
        need = limits.max_pages(group, request.max_len - 1)
        if need > total:
            return (
                f"the request needs {need} pages of {limits.page_size} tokens, but the pool has "
                f"{total}; lower max_tokens or raise --num-pages"
            )
    return None
