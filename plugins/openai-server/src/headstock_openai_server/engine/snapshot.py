"""A snapshot of running, waiting and cached requests, for the live view."""

from __future__ import annotations

import numpy as np

from headstock.scheduler import Limits, RowCounter, State
from headstock.spi.arrays import Ints
from headstock_openai_server.engine.messages import Lane, Snapshot, TreeNode

MAX_LANES = 64
"""Maximum number of listed requests, for running and waiting ones each."""
MAX_CELLS = 1024
"""Cells of a page map; of a larger pool, each cell stands for several pages."""
MAX_COLUMNS = 512
"""Leading pages of a request that the tree covers, which bounds its time to 4 ms."""

FREE, CACHED, LIVE, SHARED = range(4)
"""The states of a page: free, only in the prefix index, of one request, of several."""


def take_snapshot(state: State, limits: Limits) -> Snapshot:
    """Take a snapshot; on the engine's thread, between two steps."""
    # Owned values must be read here, since later steps write them in place.
    rows = state.rows_by_priority[:MAX_LANES]
    counters = state.row_counters
    lanes: list[Lane] = []
    for row in rows.tolist():
        entry = state.requests_by_row[row]
        if entry is not None:
            lanes.append(
                Lane(
                    entry.request.id,
                    int(counters[RowCounter.NUM_PROMPT, row]),
                    int(counters[RowCounter.NUM_CACHED, row]),
                    int(counters[RowCounter.NUM_COMPUTED, row]),
                    int(counters[RowCounter.NUM_KNOWN, row]),
                )
            )
    waiting: list[Lane] = []
    for entry in state.waiting:
        if len(waiting) == MAX_LANES:
            break
        waiting.append(
            Lane(entry.request.id, len(entry.request.prompt), 0, 0, len(entry.tokens)),
        )
    return Snapshot(
        lanes,
        waiting,
        state.num_running,
        len(state.waiting),
        limits.page_size,
        [map_pages(state, limits, group) for group in range(len(limits.num_pages))],
        find_tree(state, rows),
    )


def map_pages(state: State, limits: Limits, group: int) -> bytes:
    """The states of a group's pages as a row of digits, at most MAX_CELLS."""
    refs = state.refs[group][1:]  # not page 0, which is the dummy
    states = np.minimum(refs, 2) + np.where(refs > 0, 1, 0)  # 0, LIVE or SHARED
    if limits.policy is not None:
        cached = np.zeros(len(refs) + 1, bool)
        cached[limits.policy.indexed_pages(state.index, group)] = True
        states[cached[1:] & (refs == 0)] = CACHED
    return shrink_map(states.astype(np.uint8), MAX_CELLS)


def shrink_map(states: np.ndarray, most: int) -> bytes:
    """The states as digits; above `most`, one digit for the most frequent state of each group of
    neighbours.   states: [n] uint8
    """
    size = -(-len(states) // most)
    if size > 1:
        edges = np.arange(0, len(states), size)
        counts = np.stack([np.add.reduceat(states == each, edges) for each in range(4)])
        states = counts.argmax(0).astype(np.uint8)
    return bytes(states + ord("0"))


def find_tree(state: State, rows: Ints) -> list[TreeNode]:
    """The tree of leading pages that the rows share, by the first group that keeps all tokens."""
    groups = np.flatnonzero(~state.first_pages[:, rows].any(axis=1))
    if not len(rows) or not len(groups):
        return []
    group = int(groups[0])
    spans = np.minimum(state.spans[group, rows], MAX_COLUMNS)
    table = np.array(state.table[group, rows, : int(spans.max(initial=0))])
    # Make columns after a row's end unique, so that no two rows share them.
    behind = np.arange(table.shape[1]) >= spans[:, None]
    table[behind] = -1 - np.nonzero(behind)[0]
    return build_tree(table, spans)


def build_tree(table: Ints, spans: Ints) -> list[TreeNode]:
    """The prefix tree of the rows of `table`, parents before children.

    table: [rows, columns]   spans: [rows], the columns of each row that count
    """
    nodes: list[TreeNode] = []
    tasks = [(-1, np.arange(len(table)), 0)]
    while tasks:
        parent, rows, start = tasks.pop()
        part = table[rows, start:]
        differ = np.flatnonzero((part != part[0]).any(axis=0))
        end = start + int(differ[0]) if len(differ) else int(spans[rows].min())
        if end > start:
            nodes.append(TreeNode(parent, end - start, len(rows)))
            parent = len(nodes) - 1
        if len(rows) == 1 or end >= table.shape[1]:
            continue
        firsts = table[rows, end]
        tasks.extend(
            (parent, rows[firsts == first], end) for first in np.unique(firsts) if first >= 0
        )
    return nodes
