"""Cases of fields: what an outcome is with a record as it is, and with one field of it changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import numpy as np
from torch import Tensor

from headstock.errors import HeadstockError

Observe = Callable[[Any], object]
Case = Callable[[], tuple[object, object]]
"""Makes the outcome before a change and the one after it."""


def vary(
    record: Any, observe: Observe, changes: Mapping[str, Any], owner: str = ""
) -> dict[str, Case]:
    """A case for each field: `observe` sees the record, and the record with that field changed.

    owner: the class that declares the fields; empty for the record's own
    """
    prefix = owner or type(record).__name__

    def case(name: str, value: object) -> Case:
        return lambda: (
            outcome_of(observe, record),
            outcome_of(observe, attrs.evolve(record, **{name: value})),
        )

    return {f"{prefix}.{name}": case(name, value) for name, value in changes.items()}


def outcome_of(observe: Observe, record: object) -> object:
    """What `observe` makes of the record, as plain values; a refusal is an outcome too.

    A crash is none: that code falls over a value does not show that it honours the field.
    """
    try:
        return plain(observe(record))
    except (HeadstockError, ValueError, AssertionError) as error:
        return type(error).__name__, str(error)


def plain(value: object) -> object:
    """The value with tensors and arrays as lists, which `==` compares."""
    match value:
        case Tensor():
            return str(value.dtype), tuple(value.shape), repr(value.tolist())
        case np.ndarray():
            return repr(value.tolist())
        case Mapping():
            return {name: plain(each) for name, each in value.items()}
        case tuple() | list():
            return [plain(each) for each in value]
    if attrs.has(type(value)):
        return {name: plain(getattr(value, name)) for name in attrs.fields_dict(type(value))}
    return value
