"""Engines that each neglect a rule: of aborts, of padding, of what is refused, of who waits, of what is closed."""

from __future__ import annotations

from typing import Any

import pytest

from headstock import intake
from headstock.engine import worker
from headstock.schedule import absorb, admit
from headstock_cuda_graph.runner import CudaGraphRunner

from . import hunts_rules as hunts
from .broken import Mutant, around


def by_prefix(aborted: Any, draft: Any, id: str, reason: str) -> None:
    """An abort takes every request whose id begins so."""
    entries = [*draft.waiting, *(entry for entry in draft.seats if entry is not None)]
    for name in [entry.request.id for entry in entries if entry.request.id.startswith(id)]:
        aborted(draft, name, reason)


def of_the_queue_alone(aborted: Any, draft: Any, id: str, reason: str) -> None:
    """Who runs is not aborted."""
    if any(entry.request.id == id for entry in draft.waiting):
        aborted(draft, id, reason)


def as_if_it_were_there(aborted: Any, draft: Any, id: str, reason: str) -> None:
    """An abort of who is not there is a mistake."""
    entries = [*draft.waiting, *(entry for entry in draft.seats if entry is not None)]
    aborted(draft, {entry.request.id: id for entry in entries}[id], reason)


def one_page_more(has_room: Any, draft: Any, head: Any, length: int, below: int | None = None) -> bool:
    """A request waits until there is a page more than it needs."""
    return bool(has_room(draft, head, length + draft.limits.page_size, below))


def padding_as_it_was(load: Any, self: Any, bucket: Any, step: Any) -> None:
    """Rows of a bucket that the step does not need stay what they were."""
    before = bucket.inputs.clone()
    load(self, bucket, step)
    count = len(step.rows)
    bucket.inputs[:, count:] = before[:, count:]


def threads_stay(patch: pytest.MonkeyPatch) -> None:
    """A closed engine keeps its thread."""
    kept: list[Any] = []

    def close(self: worker.WorkerThread) -> None:
        kept.append(self)
        self.inner.close()

    patch.setattr(worker.WorkerThread, "close", close)


NEGLECTED = {
    "aborts by prefix": Mutant("C4", around(absorb, "aborted", by_prefix), hunts.aborts, "was not to be aborted"),
    "who runs is not aborted": Mutant(
        "C1", around(absorb, "aborted", of_the_queue_alone), hunts.aborts, "runs on though aborted"
    ),
    "aborts of who is gone raise": Mutant(
        "C2", around(absorb, "aborted", as_if_it_were_there), hunts.aborts, "the scheduler failed: KeyError"
    ),
    "a page too many wanted": Mutant("C3 C6", around(admit, "has_room", one_page_more), hunts.large_head, "still busy"),
    "padding rows stay as they were": Mutant(
        "P4",
        around(CudaGraphRunner, "load", padding_as_it_was),
        hunts.replays,
        "said|failed|written though it was free",
    ),
    "token ids not checked": Mutant(
        "P5", around(intake, "check_ids", lambda check, *_: None), hunts.extreme_ids, "was taken|not itself"
    ),
    "threads stay": Mutant("S9", threads_stay, hunts.closing, "threads and files"),
}
"""What is neglected -> how, who notices, and in which words."""
