"""Steps of a schedule as values of a block. What a record consists of is read off its class, so
that a field that is added to an event or a plan is recorded without a word here.
"""

from __future__ import annotations

from typing import Any, get_args

import attrs
import numpy as np

from headstock.record.block import BlockReader, BlockWriter
from headstock.record.moment import Moment, Noted, Seated
from headstock.record.names import PageNames
from headstock.scheduler import Event, Plan, Request

KINDS: tuple[type[Any], ...] = get_args(Event)
LEFT_OUT = frozenset({"params"})
"""Fields of a request that only the sampler reads: its texts and numbers are no part of the
schedule.
"""

NOTHING, ARRAY, RECORD, PLAIN = range(4)


def names_of(kind: type[Any]) -> list[str]:
    """The recorded fields of a class."""
    return [each.name for each in attrs.fields(kind) if each.name not in LEFT_OUT]


def shape() -> dict[str, list[str]]:
    """What recorded classes consist of; a recording with another shape is of another version."""
    return {kind.__name__: names_of(kind) for kind in (*KINDS, Request, Plan)}


def put_record(block: BlockWriter, value: Any) -> None:
    """Add an event, a request or a plan."""
    kind = type(value)
    for each in names_of(kind):
        put(block, f"{kind.__name__}.{each}", getattr(value, each))


def put(block: BlockWriter, key: str, value: Any) -> None:
    """Add one field's value."""
    if value is None:
        block.number(NOTHING)
    elif isinstance(value, np.ndarray):
        block.number(ARRAY)
        block.array(key, value)
    elif isinstance(value, Request):
        block.number(RECORD)
        put_record(block, value)
    else:
        block.number(PLAIN)
        block.json(value)


def get_record(block: BlockReader, kind: type[Any]) -> Any:
    """The next event, request or plan."""
    values = {each: get(block, f"{kind.__name__}.{each}") for each in names_of(kind)}
    if kind is Plan and len(values["copies"]):
        values["copies"] = values["copies"].reshape(-1, 2)
    return kind(**values)


def get(block: BlockReader, key: str) -> Any:
    """The next field's value."""
    form = block.number()
    if form == NOTHING:
        return None
    if form == ARRAY:
        return block.array(key)
    if form == RECORD:
        return get_record(block, Request)
    if form == PLAIN:
        value = block.json()
        return tuple(value) if isinstance(value, list) else value
    raise ValueError(f"{key} is of no known form")


def put_step(block: BlockWriter, noted: Noted, names: PageNames | None) -> None:
    """Add a step, tokens by their names unless `names` is None."""
    block.number(noted.at)
    block.number(len(noted.events))
    for event in noted.events:
        block.number(KINDS.index(type(event)))
        put_record(block, event if names is None else names.hide(event))
    block.json(noted.error)
    if noted.plan is None:
        return
    put_record(block, noted.plan)
    block.json([[entry.request.id, entry.preemptions] for entry in noted.joined])
    if names is not None:
        names.seat(noted.plan, noted.joined)


def get_step(block: BlockReader, number: int) -> Moment:
    """The next step, which is that of `number`."""
    at = block.number()
    events = []
    for _ in range(block.number()):
        kind = block.number()
        if not 0 <= kind < len(KINDS):
            raise ValueError(f"no event is of kind {kind}")
        events.append(get_record(block, KINDS[kind]))
    error = block.json()
    plan = None if error else get_record(block, Plan)
    pairs = [] if plan is None else zip(plan.new_row_ids.tolist(), block.json(), strict=True)
    seated = tuple(Seated(id=id, row=row, again=again) for row, (id, again) in pairs)
    return Moment(number=number, at=at, events=tuple(events), plan=plan, seated=seated, error=error)
