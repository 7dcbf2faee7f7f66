"""Engines that are each broken in one way, as engines have been."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
import toy_plugins
from attrs import evolve, frozen

from headstock.engine import engine
from headstock.execution import buffers, executor, sampling_inputs
from headstock.execution.prefix_tracker import PrefixTracker
from headstock.scheduler import (
    Failed,
    RowCounter,
    admission,
    apply,
    lifecycle,
    page_pool,
    planning,
    prefix_insert,
    selection,
)
from headstock.spi import Match
from headstock_radix_cache.policy import RadixCache

# The package exports a function of this name.
step = import_module("headstock.scheduler.step")

Patch = Callable[[pytest.MonkeyPatch], None]

DIFFERS = r"assert [(\[{].* == "
"""Two answers that were to be equal are not."""


@frozen
class Mutant:
    """A way to break the engine, and what tests say that notice it (a regular expression)."""

    apply: Patch
    said: str


def around(owner: Any, name: str, wrap: Callable[..., Any]) -> Patch:
    """Puts `wrap(original, *arguments)` in the place of a function."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        original = getattr(owner, name)
        patch.setattr(
            owner, name, lambda *arguments, **keywords: wrap(original, *arguments, **keywords)
        )

    return apply


def free_twice(free_row_pages: Any, state: Any, row: int) -> None:
    """The row's private pages go back twice."""
    private = page_pool.copy_row_pages(state, 0, row)[
        int(state.row_counters[RowCounter.NUM_INDEXED, row]) :
    ]
    free_row_pages(state, row)
    page_pool.free_pages(state, 0, private)


def lose_one(free_pages: Any, state: Any, group: int, given: np.ndarray) -> None:
    """The last page is forgotten."""
    free_pages(state, group, given[:-1])


def without_writing(dedup_pages: Any, state: Any, *arguments: Any) -> None:
    """A row moves to other pages and its page table is not told."""
    writes = list(state.writes)
    dedup_pages(state, *arguments)
    state.writes = writes


def with_part(
    match: Any, policy: RadixCache, index: Any, tokens: np.ndarray, namespace: str
) -> Match:
    """A page counts as found when its first token is right."""
    found = match(policy, index, tokens, namespace)
    node, rest = (
        found.handle or index.roots.get(namespace),
        tokens[found.pages.size * policy.page_size :],
    )
    if node is None or len(rest) < policy.page_size:
        return found
    child = next(
        (child for child in node.children.values() if child.key[:4] == rest[:1].tobytes()), None
    )
    if child is None:
        return found
    return Match(np.append(found.pages, np.int32([[child.page]]), axis=1), child)


def whole_prompt(match_prefix: Any, state: Any, entry: Any) -> Any:
    """The last token of a prompt may be cached too."""
    return state.limits.policy.match_prefix(
        state.index, entry.tokens, entry.request.prefix_namespace
    )


def without_promise(mark_logits: Any, state: Any, num_scheduled: np.ndarray) -> Any:
    """The token that a launched step will sample is not counted."""
    num_logits, samples, pooling = mark_logits(state, num_scheduled)
    state.row_counters[RowCounter.NUM_TOKENS] -= samples
    return num_logits, samples, pooling


def behind_drafts(free_out_of_window: Any, state: Any, group: int, rows: np.ndarray) -> None:
    """Pages are freed behind what was computed, though drafts may be rejected and go back."""
    known = state.row_counters[RowCounter.NUM_KNOWN].copy()
    state.row_counters[RowCounter.NUM_KNOWN] = state.row_counters[RowCounter.NUM_COMPUTED]
    free_out_of_window(state, group, rows)
    state.row_counters[RowCounter.NUM_KNOWN] = known


def groups_go_on(apply_plan: Any, tracker: PrefixTracker, *arguments: Any) -> None:
    """Groups are not made anew when the pages of their rows change."""
    is_stale = tracker.is_stale
    apply_plan(tracker, *arguments)
    tracker.is_stale = is_stale


def lost_with_an_empty_plan(make_plan: Any, state: Any, num_scheduled: np.ndarray) -> Any:
    """What a plan without rows would write is dropped."""
    plan = make_plan(state, num_scheduled)
    if not len(plan.rows):
        state.writes = []
    return plan


def for_whoever_sits_there(apply_samples: Any, state: Any, event: Any) -> None:
    """News of a row goes to the row's present request."""
    taken = state.row_counters[RowCounter.ACTIVE].take(event.rows) > 0
    admission_ids = state.row_counters[RowCounter.ADMISSION_ID].take(event.rows)
    apply_samples(
        state, evolve(event, admission_ids=np.where(taken, admission_ids, event.admission_ids))
    )


def stop_at_once(init_row: Any, state: Any, entry: Any, row: int, cached: int) -> None:
    """Stop ids count from the first token on."""
    init_row(state, entry, row, cached)
    state.row_counters[RowCounter.MIN_LEN, row] = 0


def youngest_first(sort_rows: Any, state: Any) -> None:
    """Rows are sorted in the wrong order."""
    stale = state.rows_unsorted
    sort_rows(state)
    state.rows_by_priority = (
        state.rows_by_priority[::-1].copy() if stale else state.rows_by_priority
    )


def waits_for_pages(
    preempt_until_fits: Any, state: Any, num_scheduled: np.ndarray, needs: np.ndarray
) -> np.ndarray:
    """The lowest priority keeps its pages and waits for more, though nobody else runs."""
    alone = np.count_nonzero(num_scheduled) == num_scheduled[state.rows_by_priority[-1]] > 0
    return (
        np.zeros_like(num_scheduled) if alone else preempt_until_fits(state, num_scheduled, needs)
    )


def admission_id_kept(vacate_row: Any, state: Any, row: int) -> None:
    """A released seat still answers to its last request."""
    admission_id = state.row_counters[RowCounter.ADMISSION_ID, row]
    vacate_row(state, row)
    state.row_counters[RowCounter.ADMISSION_ID, row] = admission_id


def in_flight(insert_full_pages: Any, state: Any) -> None:
    """Pages of the step that still runs are indexed."""
    state.limits, limits = evolve(state.limits, overlap=False), state.limits
    insert_full_pages(state)
    state.limits = limits


def unjudged_chunks(make_events: Any, plan: Any, sample: Any, *more: Any) -> Any:
    """The logits of a chunk that gives no token are not checked."""
    if sample is None:
        return make_events(plan, sample, *more)
    healthy = sample.healthy.clone()
    healthy[plan.last_logits[plan.samples == 0]] = True
    return make_events(plan, evolve(sample, healthy=healthy), *more)


def without_namespace(
    match: Any, policy: RadixCache, index: Any, tokens: np.ndarray, namespace: str
) -> Match:
    """Every tenant looks into the first one's prefixes."""
    return match(policy, index, tokens, next(iter(index.roots), namespace))


def all_fail(make_events: Any, plan: Any, sample: Any, *more: Any) -> Any:
    """One unhealthy row fails its whole step."""
    unhealthy = sample is not None and not sample.healthy.all()
    return (
        [Failed(plan.rows, plan.admission_ids)] if unhealthy else make_events(plan, sample, *more)
    )


def table_not_cleared(apply_plan: Any, self: Any, plan: Any, new_rows: dict[int, Any]) -> None:
    """A seat's page table keeps what its last request left."""
    before = [table[list(new_rows)].clone() for table in self.page_tables]
    apply_plan(self, plan, new_rows)
    for table, old in zip(self.page_tables, before, strict=True):
        table[list(new_rows)] = torch.where(table[list(new_rows)] == 0, old, table[list(new_rows)])


def only_the_last(apply_pending: Any, self: Any) -> None:
    """The table entries of a plan that failed are lost."""
    del self.pending_plans[:-1]
    apply_pending(self)


def kept_too_early(keep: Any, self: Any, rows: Any, positions: Any, tokens: Any) -> None:
    """A sampled token lands one place before its own."""
    keep(self, rows, positions - 1, tokens)


def no_ban(join: Any, self: Any, row: int, request: Any) -> None:
    """min_tokens bans nothing."""
    join(self, row, request)
    self.ruled_until[row] = 0


def noise_of_the_batch(select: Any, self: Any, rows: Any, positions: Any, table: Any) -> Any:
    """Noise depends on the place in the batch."""
    num_scheduled = select(self, rows, positions, table)
    return (
        num_scheduled
        if num_scheduled.seeds is None
        else evolve(num_scheduled, seeds=torch.arange(len(num_scheduled.seeds)))
    )


def stray(qkv_rope_store: Any, self: Any, x: Any, layer: Any, batch: Any) -> Any:
    """A kernel writes each token to the page before its own, too."""
    pool, slots = batch.pools[layer.index], batch.slots[layer.group]
    pool[slots // pool.shape[2] - 1, 0, slots % pool.shape[2], 0] = 3.0
    return qkv_rope_store(self, x, layer, batch)


MUTANTS = {
    "pages freed twice": Mutant(
        around(lifecycle, "free_row_pages", free_twice),
        "(free|indexed) twice|not its own|free page is in use|counts do not match",
    ),
    "pages lost": Mutant(
        around(page_pool, "free_pages", lose_one),
        "a page is lost|evict without a cache policy|are evictable",
    ),
    "duplicates freed behind the table's back": Mutant(
        around(prefix_insert, "dedup_pages", without_writing), "not its own"
    ),
    "part of a page shared": Mutant(
        around(RadixCache, "match_prefix", with_part),
        "part of a page|not the same to both|a hit changes what is said",
    ),
    "last token not computed": Mutant(
        around(admission, "match_prefix", whole_prompt), "the last token is not computed"
    ),
    "held pages evicted": Mutant(
        around(RadixCache, "hold", lambda hold, *_: None),
        r"Node\(.* refs=|evicted a page that a running row holds|pages can be evicted, and no row",
    ),
    "promise dropped": Mutant(
        around(planning, "mark_logits", without_promise),
        "running and .* waiting after|runs nothing",
    ),
    "window freed under drafts": Mutant(
        around(step, "free_out_of_window", behind_drafts), "not its own|dummy page"
    ),
    "writes lost with an empty plan": Mutant(
        around(step, "make_plan", lost_with_an_empty_plan), "not its own"
    ),
    "stale news taken": Mutant(
        around(apply, "apply_samples", for_whoever_sits_there),
        "wrong tokens|said .* and not|knows more tokens",
    ),
    "stop before min_tokens": Mutant(
        around(admission, "init_row", stop_at_once), "before min_tokens"
    ),
    "youngest first": Mutant(
        around(step, "sort_rows", youngest_first),
        "the older one was preempted|for a younger one|first in priority order was preempted",
    ),
    "lowest priority never gives way": Mutant(
        around(selection, "preempt_until_fits", waits_for_pages), "still busy|does not end"
    ),
    "ended twice": Mutant(
        around(lifecycle, "vacate_row", admission_id_kept),
        "ended twice|keeps something|took the engine along",
    ),
    "pages in flight indexed": Mutant(
        around(step, "insert_full_pages", in_flight), "had yet to be computed"
    ),
    "chunks not judged": Mutant(
        around(engine, "make_step_events", unjudged_chunks), "NaN of a chunk"
    ),
    "tenants mixed": Mutant(
        around(RadixCache, "match_prefix", without_namespace), r"another tenant|cached\(|== \[\]"
    ),
    "too long not refused": Mutant(
        around(apply, "find_refusal", lambda *_: None), "still busy|was not refused"
    ),
    "NaN fails all": Mutant(around(engine, "make_step_events", all_fail), "did not fail alone"),
    "table not cleared": Mutant(
        around(buffers.Buffers, "apply_plan", table_not_cleared), "nothing was wrong with"
    ),
    "failed steps forgotten": Mutant(
        around(executor.LocalExecutor, "_apply_pending_plans", only_the_last),
        "nothing was wrong with",
    ),
    "token not kept on the device": Mutant(
        around(buffers.Buffers, "store_tokens", lambda keep, *_: None), "said .* and not"
    ),
    "samples not put back": Mutant(
        around(executor, "_restore_order", lambda restore, sample, place: sample),
        "said .* and not",
    ),
    "groups kept too long": Mutant(
        around(PrefixTracker, "apply_plan", groups_go_on),
        r"assert \(\[0, 1, 2\], \[3\], \[8\]\) ==",
    ),
    "token kept too early": Mutant(
        around(buffers.Buffers, "store_tokens", kept_too_early), "said .* and not"
    ),
    "min_tokens bans nothing": Mutant(
        around(sampling_inputs.SamplingTable, "write_row", no_ban),
        "a stop id before six tokens|said .* and not",
    ),
    "noise of the batch": Mutant(
        around(sampling_inputs.SamplingTable, "make_sampling", noise_of_the_batch), DIFFERS
    ),
    "stray write": Mutant(
        around(toy_plugins.ToyOps, "qkv_rope_store", stray), "written though it was free"
    ),
}
"""What is broken -> how, and in which words it is noticed."""
