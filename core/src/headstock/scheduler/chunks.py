"""Where chunks of prompts end, in models that keep a state."""

from __future__ import annotations

from headstock.scheduler.row_counters import RowCounter, any_set, indices
from headstock.scheduler.state import State
from headstock.spi.arrays import Ints


def align_chunks(state: State, num_scheduled: Ints, tokens: int) -> Ints:
    """Let chunks end at multiples of the alignment.

    A row whose chunk would be empty then gets the shortest one, while the budget lasts.

    tokens: the step's budget
    num_scheduled, returns: [rows] int32; the same array where nothing changes
    """
    limits, counters = state.limits, state.row_counters
    if limits.recompute or limits.alignment == 1:
        return num_scheduled
    num_computed, num_prompt = counters[RowCounter.NUM_COMPUTED], counters[RowCounter.NUM_PROMPT]
    rows = indices((num_scheduled > 0) & ((num_computed < num_prompt) | (num_scheduled > 1)))
    if not len(rows):
        return num_scheduled
    aligned = num_scheduled.copy()
    for row in rows.tolist():
        start = int(num_computed[row])
        aligned[row] = end_chunk(state, row, start, start + int(num_scheduled[row])) - start
    # A scheduler that gives many rows a few tokens each must not stop all of them.
    if not aligned[rows].all():
        spare = tokens - int(aligned.sum())
        for row in state.rows_by_priority.tolist():
            if num_scheduled[row] and not aligned[row]:
                start = int(num_computed[row])
                count = end_chunk(state, row, start, start + limits.alignment) - start
                if count <= spare:
                    aligned[row] = count
                    spare -= count
    return aligned if any_set(aligned != num_scheduled) else num_scheduled


def end_chunk(state: State, row: int, start: int, stop: int) -> int:
    """Return where a chunk of the row ends that begins at `start` and may end at `stop`.

    That is at `start` where no chunk fits.
    """
    size = state.limits.alignment
    num_prompt = int(state.row_counters[RowCounter.NUM_PROMPT, row])
    if size > 1:
        if start >= num_prompt:
            # An answer that was computed token by token is computed so again: operations compute
            # at once what fills a whole block.
            return min(stop, -(-start // size) * size + size - 1)
        stop = min(stop, num_prompt)
    return stop if size == 1 or stop == num_prompt else max(stop // size * size, start)
