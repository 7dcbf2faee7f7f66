"""What a replay shows of pages and prefixes, thinned out so that any number of steps fits into one
picture.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from attrs import define, field

from headstock.record import ReplayedStep
from headstock.scheduler import Limits, Plan, State
from headstock_replay_view.lanes import Lanes
from headstock_replay_view.prefixes import Prefixes

MAX_COLUMNS = 1024
"""Page maps kept at most; half of them at least, once there are so many steps."""
MAX_TREES = 96
MAX_ROWS = 384
"""Rows of the page map at most; a row stands for several pages when there are more."""
FINE_ROWS = 4096
"""Rows kept until the map's height is known."""
FREE, CACHED, LIVE, SHARED = range(4)
LATEST = 1 << 62
"""Nanoseconds after which a clock stands still, so that no difference of a damaged one leaves 64
bits.
"""

SERIES = (
    *("at", "prefill", "decode", "told"),
    *("running", "waiting", "preempted"),
    *("queued", "prefilling", "decoding", "stalled", "away"),
    *("free", "cached", "live", "shared"),
)
"""What is kept of every step: nanoseconds, tokens of prompts computed, decode rows, output tokens
that became known; requests with a seat and without, preemptions so far; requests by phase (`away`:
preempted); pages by kind.
"""


@define
class Thinned:
    """Values of some steps: at most `most`, evenly spread however many steps there are."""

    most: int
    stride: int = 1
    steps: list[int] = field(factory=list)
    values: list[Any] = field(factory=list)

    def wants(self, number: int) -> bool:
        """Whether the step is one to keep."""
        return number % self.stride == 0

    def add(self, number: int, value: Any) -> None:
        """Keep a value; every second one goes when there are too many."""
        self.steps.append(number)
        self.values.append(value)
        if len(self.steps) > self.most:
            self.stride *= 2
            self.steps, self.values = self.steps[::2], self.values[::2]


@define
class Watch:
    """Looks at each replayed step before the next one is run."""

    limits: Limits
    series: list[tuple[int, ...]] = field(factory=list)
    maps: Thinned = field(factory=lambda: Thinned(MAX_COLUMNS))
    trees: Thinned = field(factory=lambda: Thinned(MAX_TREES))
    prefixes: Prefixes = field(init=False)
    lanes: Lanes = field(init=False)
    highest: int = 1
    differs: int | None = None

    def __attrs_post_init__(self) -> None:
        self.prefixes = Prefixes(self.limits)
        self.lanes = Lanes(self.limits)

    def see(self, replayed: ReplayedStep) -> None:
        """Take a step in; one that failed is not drawn, nor one that differs, whose plan is not
        that of its state.
        """
        recorded, state, plan = replayed.recorded, replayed.after, replayed.recorded.plan
        if replayed.divergence is not None:
            self.differs = recorded.number
            return
        if state is None or plan is None:
            return
        number = recorded.number
        last = self.series[-1][0] if self.series else 0
        at = min(max(recorded.at, last), LATEST)
        self.lanes.see(recorded, at, state, plan)
        self.series.append(self.numbers(at, state, plan))
        self.prefixes.see(state, number)
        if not self.maps.wants(number) and not self.trees.wants(number):
            return
        indexed = self.indexed(state)
        if self.maps.wants(number):
            self.maps.add(number, self.page_map(state, indexed))
        if self.trees.wants(number):
            self.trees.add(number, self.prefixes.tree(indexed, state.refs[0]))

    def numbers(self, at: int, state: State, plan: Plan) -> tuple[int, ...]:
        """The step's entries of SERIES."""
        refs, total = state.refs[0], self.limits.num_pages[0]
        held, shared = int(np.count_nonzero(refs)), int(np.count_nonzero(refs > 1))
        cached = len(state.regions)
        if self.limits.policy is not None:
            stats = self.limits.policy.stats(state.index)
            cached += stats.pages - stats.held
        free = total - held - cached
        work = (
            plan.num_tokens - plan.num_decode,
            plan.num_decode,
            int(state.accepted.counts.sum()),
        )
        requests = (state.num_running, len(state.waiting), state.num_preempted)
        return (
            at,
            *work,
            *requests,
            *self.lanes.count_phases(state),
            free,
            cached,
            held - shared,
            shared,
        )

    def columns(self) -> dict[str, np.ndarray]:
        """Each of SERIES.   each: [steps] int64"""
        table = np.array(self.series, np.int64).reshape(-1, len(SERIES)).T
        return dict(zip(SERIES, table, strict=True))

    def indexed(self, state: State) -> np.ndarray:
        """The pages that the prefix index holds.   returns: [n] int32"""
        return (
            np.zeros(0, np.int32)
            if self.limits.policy is None
            else self.limits.policy.indexed_pages(state.index)
        )

    def page_map(self, state: State, indexed: np.ndarray) -> np.ndarray:
        """What each page is, or most of the pages that make a row.

        returns: [at most FINE_ROWS] uint8
        """
        refs = state.refs[0]
        kinds = np.zeros(len(refs), np.uint8)
        kinds[indexed] = CACHED
        kinds[[region.pages[0] for region in state.regions]] = CACHED
        kinds[refs > 0] = LIVE
        kinds[refs > 1] = SHARED
        used = np.flatnonzero(kinds)
        self.highest = max(self.highest, int(used[-1]) if len(used) else 0)
        return mostly(kinds[1:], self.per_fine_row)

    @property
    def per_fine_row(self) -> int:
        """Pages in a row as it is kept."""
        return -(-self.limits.num_pages[0] // FINE_ROWS)

    @property
    def height(self) -> tuple[int, int]:
        """Rows of the finished map, and pages in each: up to the highest page that was ever
        used.
        """
        fine = -(-self.highest // self.per_fine_row)
        each = -(-fine // MAX_ROWS)
        return -(-fine // each), each * self.per_fine_row

    def picture(self) -> np.ndarray:
        """The page map over time.   returns: [steps kept, rows] uint8"""
        rows, pages = self.height
        each = pages // self.per_fine_row
        columns = [mostly(column, each)[:rows] for column in self.maps.values]
        return np.array(columns, np.uint8).reshape(len(columns), rows)


def mostly(kinds: np.ndarray, each: int) -> np.ndarray:
    """The most frequent kind among `each` neighbours, the busier one when two are equally
    frequent.
    """
    if each == 1:
        return kinds
    # 255: no page
    grid = np.pad(kinds, (0, -len(kinds) % each), constant_values=255).reshape(-1, each)
    counts = np.stack([(grid == kind).sum(1) for kind in (SHARED, LIVE, CACHED, FREE)])
    kept: np.ndarray = (SHARED - counts.argmax(0)).astype(np.uint8)
    return kept
