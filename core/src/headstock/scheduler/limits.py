"""What never changes while an engine runs."""

from __future__ import annotations

from attrs import frozen

from headstock.scheduler.request import Request
from headstock.spi.cache import CachePolicy
from headstock.spi.model_config import KVGroup
from headstock.spi.scheduler import ScheduleFunction

_IN_FLIGHT = 16
"""Tokens, promised or drafted, by which a row may be ahead of what is known of it."""


@frozen(kw_only=True, eq=False)
class Limits:
    """The sizes and policies of one engine.

    `num_pages` counts usable pages of each KV group (page 0, the dummy page, comes on top);
    `max_len` is the longest sequence. `policy` is None when nothing is shared. With `overlap` the
    plan before last may still be running when the next is made. With `recompute` every token is
    computed again in every step. Where a page is the region of a whole sequence, `max_regions` of
    ended ones are kept for requests that go on from there. `scheduler` names the choosing plugin in
    errors, and `length_hint` says there what would let sequences be longer.
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
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def max_pages(self, group: int, num_tokens: int) -> int:
        """Pages of `group` that a sequence of `num_tokens` ever holds at once: a window group frees
        what lies behind its window.
        """
        pages = self.pages_for(num_tokens)
        window = self.groups[group].window
        if self.groups[group].kind != "window" or window is None:
            return pages
        return min(pages, self.pages_for(window + self.max_batch_tokens + _IN_FLIGHT) + 1)


def find_refusal(request: Request, limits: Limits) -> str | None:
    """Why the request can never run, naming both numbers, or None when it can."""
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
