"""Engines that each neglect a rule: of aborts, of padding, of what is refused, of who waits, of
what is closed, of the order of steps, of states.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from attrs import evolve

from headstock.engine import engine
from headstock.execution import row_tables, threaded
from headstock.execution.abstract_executor import Executor, Pending
from headstock.execution.row_tables import DeviceTables
from headstock.nn.short_conv import ConvInputs
from headstock.requests import client, input_processor
from headstock.scheduler import Plan, admission, apply
from headstock.scheduler.page_pool import count_available_pages
from headstock.spi import KVGroup, PrefixInputs
from headstock_cuda_graph import runner
from headstock_radix_cache.group_tree import GroupIndex
from headstock_radix_cache.policy import RadixCache

from .broken import DIFFERS, Mutant, around


def by_prefix(apply_abort: Any, state: Any, id: str, reason: str) -> None:
    """An abort takes every request whose id begins so."""
    entries = [*state.waiting, *(entry for entry in state.requests_by_row if entry is not None)]
    for name in [entry.request.id for entry in entries if entry.request.id.startswith(id)]:
        apply_abort(state, name, reason)


def of_the_queue_alone(apply_abort: Any, state: Any, id: str, reason: str) -> None:
    """Who runs is not aborted."""
    if any(entry.request.id == id for entry in state.waiting):
        apply_abort(state, id, reason)


def but_for_the_preempted(apply_abort: Any, state: Any, id: str, reason: str) -> None:
    """Who was preempted is not aborted while it waits."""
    if not any(entry.request.id == id and entry.preemptions for entry in state.waiting):
        apply_abort(state, id, reason)


def as_if_it_were_there(apply_abort: Any, state: Any, id: str, reason: str) -> None:
    """An abort of who is not there is a mistake."""
    entries = [*state.waiting, *(entry for entry in state.requests_by_row if entry is not None)]
    apply_abort(state, {entry.request.id: id for entry in entries}[id], reason)


def one_page_more(count_tokens_to_admit: Any, state: Any, head: Any) -> int:
    """A request waits until there is a page more than it needs."""
    return int(count_tokens_to_admit(state, head)) + int(state.limits.page_size)


def by_what_is_free(can_reserve: Any, state: Any, group: int, stop: int, below: Any) -> bool:
    """A row is admitted to a window or a state when a page of it is free now."""
    is_free = count_available_pages(state, group) > 0
    return is_free or bool(can_reserve(state, group, stop, below))


def of_a_neighbour(look_up_state_pages: Any, *arguments: Any) -> Any:
    """A row reads and writes the state of the one before it."""
    found = look_up_state_pages(*arguments)
    return tuple(None if pages is None else torch.roll(pages, 1) for pages in found)


def as_the_page_was(of: Any, *arguments: Any) -> ConvInputs:
    """A row that begins reads what its page holds."""
    found: ConvInputs = of(*arguments)
    return evolve(found, is_first=torch.zeros_like(found.is_first))


def of_the_chunk_alone(of: Any, *arguments: Any) -> ConvInputs:
    """A chunk is convolved as if nothing had come before it."""
    found: ConvInputs = of(*arguments)
    if found.sources is None:
        return found
    size = len(found.pages) * (len(found.sources) - 1)
    return evolve(found, sources=found.sources.masked_fill(found.sources <= size, 0))


def a_page_late(first_kept_page: Any, group: KVGroup, *sizes: int) -> int:
    """A window is thought to begin a page behind the one that the next token reads."""
    first: int = first_kept_page(group, *sizes)
    return first if group.window is None else first + 1


def padding_as_it_was(upload: Any, target: Any, *parts: Any) -> None:
    """What pads a bucket stays what it was."""
    before, start = target.clone(), 0
    upload(target, *parts)
    for values, size, _ in parts:
        target[start + len(values) : start + size] = before[start + len(values) : start + size]
        start += size


def prompt_padding_as_it_was(write: Any, tables: Any, inputs: Any, step: Any) -> None:
    """What pads the inputs of a prompt step stays what it was."""
    if isinstance(inputs, PrefixInputs):
        write(tables, inputs, step)
        return
    num_tokens, num_rows = int((step.stops - step.starts).sum()), len(step.row_ids)
    used = {"token_rows": num_tokens, "positions": num_tokens}
    used |= dict.fromkeys(("row_ids", "starts", "context_lens"), num_rows)
    before = {name: getattr(inputs, name).clone() for name in used}
    write(tables, inputs, step)
    for name, count in used.items():
        getattr(inputs, name)[count:] = before[name][count:]


def threads_stay(patch: pytest.MonkeyPatch) -> None:
    """A closed engine keeps its thread."""
    kept: list[Any] = []

    def close(self: threaded.ThreadedExecutor) -> None:
        kept.append(self)
        self.inner.close()

    patch.setattr(threaded.ThreadedExecutor, "close", close)


class Late(Pending):
    """A step that has yet to run."""

    def __init__(self, inner: Executor, plan: Plan, new_rows: Mapping[int, Any]) -> None:
        self.inner, self.plan, self.new_rows = inner, plan, new_rows
        self.future: Future[Any] = Future()

    def run(self) -> None:
        """Run it, unless that was done."""
        if self.future.done():
            return
        try:
            self.future.set_result(self.inner.execute(self.plan, self.new_rows).wait())
        except Exception as error:
            self.future.set_exception(error)

    def wait(self) -> Any:
        """What it sampled."""
        self.run()
        return self.future.result()


class Overtaking(Executor):
    """A device on which a step that needs no token of the one in flight runs before it."""

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.late: Late | None = None

    def execute(self, plan: Plan, new_rows: Mapping[int, Any]) -> Late:
        """Run the step in flight, and the new one before it if it needs nothing of it."""
        new, last = Late(self.inner, plan, new_rows), self.late
        if last is not None:
            if set(plan.admission_ids).isdisjoint(last.plan.admission_ids):
                new.run()
            last.run()
        self.late = new
        return new

    def close(self) -> None:
        """Free the device."""
        self.inner.close()


NEGLECTED = {
    "aborts by prefix": Mutant(around(apply, "apply_abort", by_prefix), "another one was aborted"),
    "who runs is not aborted": Mutant(
        around(apply, "apply_abort", of_the_queue_alone), "runs on though aborted"
    ),
    "who was preempted is not aborted": Mutant(
        around(apply, "apply_abort", but_for_the_preempted), "waits on though aborted"
    ),
    "aborts of who is gone raise": Mutant(
        around(apply, "apply_abort", as_if_it_were_there), "KeyError: 'a'"
    ),
    "a page too many wanted": Mutant(
        around(admission, "count_tokens_to_admit", one_page_more), "still busy"
    ),
    "windows not reserved": Mutant(
        around(admission, "can_reserve_pages", by_what_is_free),
        "preempted|evict without|evictable pages, got",
    ),
    "windows matched in part": Mutant(
        around(GroupIndex, "count_reusable", lambda count, index, pages: len(pages)),
        "which has a window: expected all columns",
    ),
    "windows begin a page late": Mutant(
        around(KVGroup, "first_kept_page", a_page_late),
        "not its own",
    ),
    "pages of a window never let go": Mutant(
        around(RadixCache, "release_pages", lambda *_: None), "and no row holds"
    ),
    "padding rows stay as they were": Mutant(
        around(runner, "upload", padding_as_it_was), rf"{DIFFERS}|written though it was free"
    ),
    "padding tokens stay as they were": Mutant(
        around(DeviceTables, "write", prompt_padding_as_it_was),
        rf"{DIFFERS}|written though it was free|'error'",
    ),
    "token ids not checked": Mutant(
        around(input_processor, "check_ids", lambda check, *_: None), "DID NOT RAISE RequestError"
    ),
    "a step overtakes another": Mutant(
        lambda patch: patch.setattr(engine, "ThreadedExecutor", Overtaking),
        "nothing was wrong with",
    ),
    "who leaves runs on": Mutant(
        around(client.RequestClient, "close", lambda close, self: None), "runs on"
    ),
    "threads stay": Mutant(threads_stay, "threads and files"),
    "the state of a neighbour": Mutant(
        around(row_tables, "look_up_state_pages", of_a_neighbour), r"said \[|prompt \d+, token"
    ),
    "a new row reads its page": Mutant(
        around(ConvInputs, "of", as_the_page_was), r"prompt \d+, token|not close"
    ),
    "chunks forget": Mutant(
        around(ConvInputs, "of", of_the_chunk_alone), r"prompt \d+, token|not close"
    ),
}
"""What is neglected -> how, and in which words it is noticed."""
