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
from headstock_replay_view.prefix_tree import PrefixTracker

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
class ThinnedSteps:
    """Values of some steps: at most `most`, evenly spread however many steps there are."""

    most: int
    stride: int = 1
    steps: list[int] = field(factory=list)
    values: list[Any] = field(factory=list)

    def keeps_step(self, number: int) -> bool:
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
class History:
    """Looks at each replayed step before the next one is run."""

    limits: Limits
    series: list[tuple[int, ...]] = field(factory=list)
    maps: ThinnedSteps = field(factory=lambda: ThinnedSteps(MAX_COLUMNS))
    trees: ThinnedSteps = field(factory=lambda: ThinnedSteps(MAX_TREES))
    prefixes: PrefixTracker = field(init=False)
    lanes: Lanes = field(init=False)
    highest_page: int = 1
    differing_step: int | None = None

    def __attrs_post_init__(self) -> None:
        self.prefixes = PrefixTracker(self.limits)
        self.lanes = Lanes(self.limits)

    def add_step(self, replayed: ReplayedStep) -> None:
        """Take a step in; one that failed is not drawn, nor one that differs, whose plan is not
        that of its state.
        """
        recorded, state, plan = replayed.recorded, replayed.after, replayed.recorded.plan
        if replayed.divergence is not None:
            self.differing_step = recorded.number
            return
        if state is None or plan is None:
            return
        number = recorded.number
        last = self.series[-1][0] if self.series else 0
        at = min(max(recorded.at, last), LATEST)
        self.lanes.add_step(recorded, at, state, plan)
        self.series.append(self._measure_step(at, state, plan))
        self.prefixes.add_step(state, number)
        if not self.maps.keeps_step(number) and not self.trees.keeps_step(number):
            return
        indexed = self.list_indexed_pages(state)
        if self.maps.keeps_step(number):
            self.maps.add(number, self._map_pages(state, indexed))
        if self.trees.keeps_step(number):
            self.trees.add(number, self.prefixes.make_tree(indexed, state.refs[0]))

    def _measure_step(self, at: int, state: State, plan: Plan) -> tuple[int, ...]:
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
            int(state.accepted_counts.sum()),
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

    def make_series(self) -> dict[str, np.ndarray]:
        """Each of SERIES.   each: [steps] int64"""
        table = np.array(self.series, np.int64).reshape(-1, len(SERIES)).T
        return dict(zip(SERIES, table, strict=True))

    def list_indexed_pages(self, state: State) -> np.ndarray:
        """The pages that the prefix index holds.   returns: [n] int32"""
        return (
            np.zeros(0, np.int32)
            if self.limits.policy is None
            else self.limits.policy.indexed_pages(state.index)
        )

    def _map_pages(self, state: State, indexed: np.ndarray) -> np.ndarray:
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
        self.highest_page = max(self.highest_page, int(used[-1]) if len(used) else 0)
        return _downsample_kinds(kinds[1:], self.pages_per_fine_row)

    @property
    def pages_per_fine_row(self) -> int:
        """Pages in a row as it is kept."""
        return -(-self.limits.num_pages[0] // FINE_ROWS)

    @property
    def map_height(self) -> tuple[int, int]:
        """Rows of the finished map, and pages in each: up to the highest page that was ever
        used.
        """
        fine = -(-self.highest_page // self.pages_per_fine_row)
        each = -(-fine // MAX_ROWS)
        return -(-fine // each), each * self.pages_per_fine_row

    def make_page_map(self) -> np.ndarray:
        """The page map over time.   returns: [steps kept, rows] uint8"""
        rows, pages = self.map_height
        each = pages // self.pages_per_fine_row
        columns = [_downsample_kinds(column, each)[:rows] for column in self.maps.values]
        return np.array(columns, np.uint8).reshape(len(columns), rows)


def _downsample_kinds(kinds: np.ndarray, each: int) -> np.ndarray:
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
