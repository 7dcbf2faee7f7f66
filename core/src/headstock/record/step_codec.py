"""Steps of a schedule as values of a block.

The fields of events, requests and plans are read off their classes, so this module stays as it is
when one of them gets a field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, get_args

import attrs
import numpy as np

from headstock.record.anonymize import TokenAnonymizer
from headstock.record.block import BlockReader, BlockWriter
from headstock.record.recorded_step import Admission, PendingRecord, RecordedStep
from headstock.scheduler import Event, Plan, Request

EVENT_TYPES: tuple[type[Any], ...] = get_args(Event)
RECORDED_TYPES: Mapping[str, type[Any]] = MappingProxyType(
    {kind.__name__: kind for kind in (*EVENT_TYPES, Request, Plan)}
)
OMITTED_FIELDS = frozenset({"params", "processor_values"})
"""Fields of a request that only the sampler reads. The schedule does not depend on them, and they
may hold text of the user.
"""

Fields = Mapping[str, Sequence[str]]
"""By the name of a recorded class, its fields in the order in which they are written."""

NONE, ARRAY, NESTED, JSON = range(4)


def _field_names(kind: type[Any]) -> list[str]:
    """Return the recorded fields of a class."""
    return [
        field.name
        for field in attrs.fields(kind)
        if field.init and field.name not in OMITTED_FIELDS
    ]


def list_fields() -> dict[str, list[str]]:
    """Return the fields of every recorded class, which a recording's header holds."""
    return {name: _field_names(kind) for name, kind in RECORDED_TYPES.items()}


def can_read(fields: object) -> bool:
    """Whether steps that consist of these fields can be read: none is unknown or sorely missed.

    What a recording of an earlier version lacks has its default: no clock, users without a name.
    """
    if not isinstance(fields, dict) or not fields.keys() <= RECORDED_TYPES.keys():
        return False
    for name, kind in RECORDED_TYPES.items():
        if name not in fields:
            if kind not in EVENT_TYPES:
                return False
            continue
        there = fields[name]
        known = {field.name: field for field in attrs.fields(kind) if field.init}
        if not isinstance(there, list) or len(set(map(str, there))) != len(there):
            return False
        if not set(map(str, there)) <= known.keys() - OMITTED_FIELDS:
            return False
        if any(known[each].default is attrs.NOTHING for each in known.keys() - {*there}):
            return False
    return True


def _write_fields(block: BlockWriter, value: Any) -> None:
    """Add the fields of an event, a request or a plan."""
    kind = type(value)
    for name in _field_names(kind):
        _write_value(block, f"{kind.__name__}.{name}", getattr(value, name))


def _write_value(block: BlockWriter, key: str, value: Any) -> None:
    """Add one field's value."""
    if value is None:
        block.write_int(NONE)
    elif isinstance(value, np.ndarray):
        block.write_int(ARRAY)
        block.write_array(key, value)
    elif isinstance(value, Request):
        block.write_int(NESTED)
        _write_fields(block, value)
    else:
        block.write_int(JSON)
        block.write_json(value)


def _read_fields(block: BlockReader, kind: type[Any], fields: Fields) -> Any:
    """Return the next event, request or plan, with these recorded fields."""
    values = {
        name: _read_value(block, f"{kind.__name__}.{name}", fields)
        for name in fields[kind.__name__]
    }
    # blocks hold flat arrays, and this one has two columns
    if kind is Plan and len(values.get("copies", ())):
        values["copies"] = values["copies"].reshape(-1, 3)
    return kind(**values)


def _read_value(block: BlockReader, key: str, fields: Fields) -> Any:
    """Return the next field's value.   raises: ValueError"""
    form = block.read_int()
    if form == NONE:
        return None
    if form == ARRAY:
        return block.read_array(key)
    if form == NESTED:
        return _read_fields(block, Request, fields)
    if form == JSON:
        value = block.read_json()
        return tuple(value) if isinstance(value, list) else value
    raise ValueError(f"{key}: expected a form from {NONE} to {JSON}, got {form}")


def write_step(
    block: BlockWriter, pending: PendingRecord, anonymizer: TokenAnonymizer | None
) -> None:
    """Add a step, tokens anonymized unless `anonymizer` is None."""
    block.write_int(pending.at)
    block.write_int(len(pending.events))
    for event in pending.events:
        block.write_int(EVENT_TYPES.index(type(event)))
        _write_fields(block, event if anonymizer is None else anonymizer.anonymize_event(event))
    block.write_json(pending.error)
    if pending.plan is None:
        return
    _write_fields(
        block, pending.plan if anonymizer is None else anonymizer.anonymize_plan(pending.plan)
    )
    block.write_json([[entry.request.id, entry.preemptions] for entry in pending.admitted])
    # after the events: tokens that this step's events carry are of rows admitted before
    if anonymizer is not None:
        anonymizer.add_rows(pending.plan, pending.admitted)


def read_step(block: BlockReader, number: int, fields: Fields) -> RecordedStep:
    """Return the next step, which gets `number`.

    fields: those of the recording's header, which `can_read` accepts
    raises: ValueError
    """
    at = block.read_int()
    event_types = [RECORDED_TYPES[name] for name in fields if name not in ("Request", "Plan")]
    events = []
    for _ in range(block.read_int()):
        kind = block.read_int()
        if not 0 <= kind < len(event_types):
            raise ValueError(f"event type: expected 0 to {len(event_types) - 1}, got {kind}")
        events.append(_read_fields(block, event_types[kind], fields))
    error = block.read_json()
    plan = None if error else _read_fields(block, Plan, fields)
    pairs = [] if plan is None else zip(plan.new_row_ids.tolist(), block.read_json(), strict=True)
    admissions = tuple(Admission(id=id, row=row, preemptions=count) for row, (id, count) in pairs)
    return RecordedStep(
        number=number, at=at, events=tuple(events), plan=plan, admissions=admissions, error=error
    )
