"""The history of a replay: numbers of all steps, page maps and prefix trees of some.

Maps and trees are thinned out, so that a run of any length fits into one picture.
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
"""Maximum number of page maps; longer runs keep at least half as many."""
MAX_TREES = 96
MAX_ROWS = 384
"""Maximum rows of the page map; in larger pools, a row stands for several pages."""
FINE_ROWS = 4096
"""Maximum rows stored until the end, when the highest page in use is known."""
FREE, CACHED, LIVE, SHARED = range(4)
LATEST = 1 << 62
"""Limit of a clock in nanoseconds, so that differences of a damaged one fit into 64 bits."""

SERIES = (
    *("at", "prefill", "decode", "sampled"),
    *("running", "waiting", "preempted"),
    *("queued", "prefilling", "decoding", "stalled", "away"),
    *("free", "cached", "live", "shared"),
)
"""The numbers of every step, in four groups.

- time in nanoseconds, prompt tokens computed, decode rows, output tokens that became known
- requests running and waiting, preemptions so far
- requests by phase (`away`: preempted)
- pages of all KV groups by kind
"""


@define
class ThinnedSteps:
    """Values of at most `most` steps, evenly spaced over a run of any length."""

    most: int
    stride: int = 1
    steps: list[int] = field(factory=list)
    values: list[Any] = field(factory=list)

    def keeps_step(self, number: int) -> bool:
        """Whether the step with this number is kept."""
        return number % self.stride == 0

    def add(self, number: int, value: Any) -> None:
        """Keep a value, and drop every second one if there are too many."""
        self.steps.append(number)
        self.values.append(value)
        if len(self.steps) > self.most:
            self.stride *= 2
            self.steps, self.values = self.steps[::2], self.values[::2]


@define
class History:
    """Collects the page's data from each replayed step before the next one runs."""

    # During the replay, because each step overwrites the state.

    limits: Limits
    series: list[tuple[int, ...]] = field(factory=list)
    maps: ThinnedSteps = field(factory=lambda: ThinnedSteps(MAX_COLUMNS))
    trees: ThinnedSteps = field(factory=lambda: ThinnedSteps(MAX_TREES))
    prefixes: PrefixTracker | None = field(init=False)
    lanes: Lanes = field(init=False)
    highest_page: int = 1
    differing_step: int | None = None

    def __attrs_post_init__(self) -> None:
        # For the first group that keeps all pages of a prefix; others have dropped some.
        whole = [number for number, group in enumerate(self.limits.groups) if group.retains_all]
        self.prefixes = PrefixTracker(self.limits, whole[0]) if whole else None
        self.lanes = Lanes(self.limits)

    def add_step(self, replayed: ReplayedStep) -> None:
        """Add a step, unless it failed or differs, which makes plan and state inconsistent."""
        recorded, state, plan = replayed.recorded, replayed.after, replayed.recorded.plan
        if replayed.divergence is not None:
            self.differing_step = recorded.number
            return
        if state is None or plan is None:
            return
        number = recorded.number
        last = self.series[-1][0] if self.series else 0
        # an untrusted recording's clock may go backwards
        at = min(max(recorded.at, last), LATEST)
        self.lanes.add_step(recorded, at, state, plan)
        self.series.append(self._measure_step(at, state, plan))
        if self.maps.keeps_step(number):
            self.maps.add(number, self._map_pages(state))
        if self.prefixes is not None:
            self.prefixes.add_step(state, number)
            if self.trees.keeps_step(number):
                self.trees.add(number, self.make_tree(self.prefixes, state))

    def _measure_step(self, at: int, state: State, plan: Plan) -> tuple[int, ...]:
        """Return the step's entry of SERIES."""
        num_held = sum(int(np.count_nonzero(refs)) for refs in state.refs)
        shared = sum(int(np.count_nonzero(refs > 1)) for refs in state.refs)
        cached = len(state.regions) * len(state.refs)
        if self.limits.policy is not None:
            stats = self.limits.policy.stats(state.index)
            # Without the regions of contiguous mode, which policies do not see (decision 0008).
            cached += sum(stats.pages) - sum(stats.held)
        free = self.num_pages - num_held - cached
        work = (
            plan.num_tokens - plan.num_decode,
            plan.num_decode,
            int(state.outcome.accepted_counts.sum()),
        )
        requests = (state.num_running, len(state.waiting), state.num_preempted)
        return (
            at,
            *work,
            *requests,
            *self.lanes.count_phases(state),
            free,
            cached,
            num_held - shared,
            shared,
        )

    def make_series(self) -> dict[str, np.ndarray]:
        """Return the numbers by the names of SERIES.   returns: [steps] int64 each"""
        table = np.array(self.series, np.int64).reshape(-1, len(SERIES)).T
        return dict(zip(SERIES, table, strict=True))

    @property
    def num_pages(self) -> int:
        """Sum of the pages of all KV groups."""
        return sum(self.limits.num_pages)

    def make_tree(self, prefixes: PrefixTracker, state: State) -> list[list[int]]:
        """Return the tree of the prefix index as segments."""
        return prefixes.make_tree(
            self.list_indexed_pages(state, prefixes.group), state.refs[prefixes.group]
        )

    def list_indexed_pages(self, state: State, group: int) -> np.ndarray:
        """Return the pages of a KV group that the prefix index holds.   returns: [n] int32"""
        return (
            np.zeros(0, np.int32)
            if self.limits.policy is None
            else self.limits.policy.indexed_pages(state.index, group)
        )

    def _map_pages(self, state: State) -> np.ndarray:
        """Return the kind of each row of pages, one group after another.

        returns: [at most FINE_ROWS] uint8
        """
        parts = []
        for group, refs in enumerate(state.refs):
            kinds = np.zeros(len(refs), np.uint8)
            kinds[self.list_indexed_pages(state, group)] = CACHED
            kinds[[region.pages[group] for region in state.regions]] = CACHED
            kinds[refs > 0] = LIVE
            kinds[refs > 1] = SHARED
            # without page 0, the dummy page of padding
            parts.append(kinds[1:])
        kinds = np.concatenate(parts)
        used = np.flatnonzero(kinds)
        self.highest_page = max(self.highest_page, int(used[-1]) + 1 if len(used) else 0)
        return _downsample_kinds(kinds, self.pages_per_fine_row)

    @property
    def pages_per_fine_row(self) -> int:
        """Pages of a kept row."""
        return -(-self.num_pages // FINE_ROWS)

    @property
    def map_height(self) -> tuple[int, int]:
        """Rows of the finished map and pages per row, up to the highest page ever in use."""
        fine = -(-self.highest_page // self.pages_per_fine_row)
        size = -(-fine // MAX_ROWS)
        return -(-fine // size), size * self.pages_per_fine_row

    def make_page_map(self) -> np.ndarray:
        """Return the page map over time.   returns: [steps kept, rows] uint8"""
        rows, pages = self.map_height
        size = pages // self.pages_per_fine_row
        columns = [_downsample_kinds(column, size)[:rows] for column in self.maps.values]
        return np.array(columns, np.uint8).reshape(len(columns), rows)


def _downsample_kinds(kinds: np.ndarray, size: int) -> np.ndarray:
    """Return the most frequent kind of every `size` pages; among equals, the busier one."""
    if size == 1:
        return kinds
    # 255: no page
    grid = np.pad(kinds, (0, -len(kinds) % size), constant_values=255).reshape(-1, size)
    counts = np.stack([(grid == kind).sum(1) for kind in (SHARED, LIVE, CACHED, FREE)])
    frequent: np.ndarray = (SHARED - counts.argmax(0)).astype(np.uint8)
    return frequent
