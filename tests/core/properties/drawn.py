"""What the properties are drawn from: small engines and small requests, so that hundreds take
seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from toy_workloads import FULL, SCHEDULERS, STATE, limits, request, window

from headstock.scheduler import Limits, Request, State
from headstock_conformance.scheduler.toy_device import VOCAB
from headstock_conformance.scheduler.toy_schedule import Drive
from headstock_radix_cache.policy import RadixCache

EXAMPLES = settings(max_examples=settings().max_examples * 2 // 5)
"""16, and under the profile `full` 100."""
LONGEST = 48
"""Tokens of a drawn request at most."""
HEAD = list(range(20))
"""Half of the prompts begin with some of these."""


@st.composite
def requests(draw: st.DrawFn, most: int = 6, **fixed: object) -> list[Request]:
    """Up to `most` requests with all that a scheduler looks at, but for what is `fixed`."""
    made = []
    for number in range(draw(st.integers(1, most))):
        tokens = HEAD[: draw(st.integers(0, 20))] if draw(st.booleans()) else []
        tokens = tokens + draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=16))
        drawn = {
            "priority": draw(st.integers(0, 2)),
            "stop_ids": tuple(draw(st.lists(st.integers(0, VOCAB - 1), max_size=3))),
            "namespace": draw(st.sampled_from(["", "", "other"])),
            "min_tokens": draw(st.integers(0, 3)),
        }
        made.append(
            request(
                str(number), tokens, draw(st.integers(1, LONGEST - len(tokens))), **(drawn | fixed)
            )
        )
    return made


@st.composite
def page_counts(draw: st.DrawFn, sizes: dict[str, Any]) -> tuple[int, ...]:
    """Pages for each group, of each at least what the longest request needs alone."""
    alone = limits(**sizes, policy=None)
    counts = []
    for number, group in enumerate(alone.groups):
        few = alone.max_pages(number, alone.max_len)
        most = alone.max_rows if group is STATE else 3 * few
        counts.append(draw(st.integers(few, most)))
    return tuple(counts)


@st.composite
def engines(draw: st.DrawFn, **fixed: object) -> Limits:
    """An engine that can serve each of `requests` alone, often with too few pages for several."""
    size = draw(st.sampled_from([1, 4, 16]))
    drawn = {
        "page_size": size,
        "max_rows": draw(st.integers(1, 5)),
        "max_batch_tokens": draw(st.sampled_from([1, 5, 30])),
        "max_len": LONGEST,
        "scheduler": draw(st.sampled_from(sorted(SCHEDULERS))),
        "overlap": draw(st.booleans()),
        "check": False,  # the properties look for themselves
    }
    kind = draw(st.sampled_from(["index", "index", "nothing", "window", "state", "both"]))
    groups = [FULL]
    if kind in ("window", "both"):
        groups.append(window(draw(st.integers(1, 20))))
    if kind in ("state", "both"):
        groups.append(STATE)
    drawn["groups"] = tuple(groups)
    drawn["num_pages"] = draw(page_counts(drawn))
    reuse = kind == "index" or (kind == "window" and draw(st.booleans()))
    policy = RadixCache(size, drawn["groups"]) if reuse else None
    return limits(**(drawn | {"policy": policy} | fixed))


def run(
    bounds: Limits,
    asked: list[Request],
    see: Callable[[Drive], None] = lambda drive: None,
    gap: int = 1,
) -> Drive:
    """The requests, one every `gap` steps, run to their end; `see` looks after every step."""
    drive, todo = Drive(bounds), list(asked)
    while todo or drive.busy:
        if todo and len(drive.plans) % gap == 0:
            drive.submit(todo.pop(0))
        drive.step()
        see(drive)
        assert len(drive.plans) < 5_000, "it does not end"
    return drive


def held(state: State, group: int = 0) -> dict[int, list[int]]:
    """Return the pages of each row in use."""
    return {row: state.pages[group][row].tolist() for row in state.rows_by_priority.tolist()}


def free(state: State, group: int = 0) -> list[int]:
    """The free pages."""
    return [page for part in state.free[group] for page in np.asarray(part).tolist()]
