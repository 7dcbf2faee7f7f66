"""How many requests run at once where each keeps a state."""

from __future__ import annotations

import attrs

from headstock.execution.buffers import BufferShape
from headstock.execution.kv_pools import count_page_bytes
from headstock.spi import LayoutKind, Ranks
from headstock.startup.build_inputs import BuildInputs
from headstock.startup.memory_plan import format_bytes

_MOST_SHARE = 2 / 3
"""The share of the memory beside the weights that states of running requests may take."""


def cut_rows(
    inputs: BuildInputs, shape: BufferShape, free: int, notes: list[str], ranks: Ranks
) -> tuple[BuildInputs, BufferShape]:
    """The inputs and the shape with as many rows as memory has room for their states, at least one.

    A state has one size whatever its request's length, and all are reserved at the start. All ranks
    have the rows of the one that has room for the fewest.

    shape: with as many rows as were asked for    free: bytes that were free before the weights
    writes: notes, a line where there are fewer
    """
    config = inputs.config
    state = count_row_bytes(shape) * shape.state_pages
    if not state:
        return inputs, shape
    weights = sum(weight.nbytes for weight in inputs.params.values())
    room = int(free * config.memory_ratio) - weights
    (rows,) = ranks.take_least([count_rows(shape.rows, state, room)])
    if rows == shape.rows:
        return inputs, shape
    notes.append(
        f"max_running_requests (--max-running-requests) is cut from {shape.rows} to {rows}: "
        f"the state of a request takes {format_bytes(state)}"
    )
    config = attrs.evolve(config, max_running_requests=rows)
    return attrs.evolve(inputs, config=config), attrs.evolve(shape, rows=rows)


def count_row_bytes(shape: BufferShape) -> int:
    """Bytes of a row's state in all layers."""
    return sum(
        count_page_bytes(group, 1, shape.kv_dtype, shape.dtype) * len(group.layers)
        for group in shape.groups
        if group.layout.kind is LayoutKind.STATE
    )


def count_rows(asked: int, state: int, room: int) -> int:
    """How many rows of `state` bytes may take their share of `room` bytes: `asked` or fewer."""
    return min(asked, max(int(_MOST_SHARE * room) // state, 1))
