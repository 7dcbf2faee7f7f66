"""Read a plugin's own options: `--opt NAME.FIELD=VALUE` becomes an instance of its attrs class."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any

import attrs

from headstock.config.value_types import SWITCH_WORDS
from headstock.errors import PluginBroken, UsageError, describe_type, shorten, suggest_name
from headstock.registry.loading import (
    SPEC_CLASSES,
    import_implementation,
    import_object,
    make_part,
    plugin_label,
)
from headstock.spi import Model, ModelSpec, PluginSpec, ScheduleFunction, SchedulerSpec


def make_options(spec: PluginSpec, assignments: Sequence[str] = ()) -> Any:
    """Make the plugin's options from the assignments to it; None when it has none.

    The last assignment to a field wins.

    raises: UsageError for an unknown field or a bad value, PluginBroken when the option class
        is not usable
    """
    pairs = [
        _parse_assignment(assignment)
        for assignment in assignments
        if _assignment_address(assignment) in _plugin_addresses(spec)
    ]
    if spec.options is None:
        if pairs:
            raise UsageError(
                f"opt (--opt) {shorten(spec.name)}.{shorten(pairs[0][0])}: {spec.name!r} has "
                "no options"
            )
        return None
    fields = _option_fields(spec)
    values = {name: _convert_option(spec, fields, name, text) for name, text in pairs}
    try:
        # The class's own validators run here, so a plugin refuses values in its own words.
        return import_object(spec, spec.options)(**values)
    except (TypeError, ValueError) as error:
        raise UsageError(f"opt (--opt) {spec.name}: {shorten(error)}") from error


def make_schedule(spec: SchedulerSpec, assignments: Sequence[str] = ()) -> ScheduleFunction:
    """Make the scheduler's function, with its options where it has any.

    raises: UsageError, PluginBroken
    """
    if spec.options is None:
        schedule = import_implementation(spec)
    else:
        schedule = make_part(spec, object, make_options(spec, assignments))
    if not callable(schedule):
        raise PluginBroken(
            f"the scheduler {spec.name!r}: {spec.implementation}: expected a function "
            f"schedule(view, budget), got {shorten(schedule)}"
        )
    function: ScheduleFunction = schedule
    return function


def make_family(spec: ModelSpec, assignments: Sequence[str] = ()) -> Model:
    """Make the model family, with its options if it has any.   raises: UsageError, PluginBroken"""
    if spec.options is None:
        family = import_implementation(spec)
    else:
        family = make_part(spec, object, make_options(spec, assignments))
    if not isinstance(family, Model):
        raise PluginBroken(
            f"the model family {spec.name!r}: {spec.implementation}: expected a Model, got "
            f"{describe_type(family)}"
        )
    return family


def find_unclaimed(assignments: Iterable[str], specs: Sequence[PluginSpec]) -> tuple[str, ...]:
    """List the assignments that address none of these plugins."""
    addresses = {address for spec in specs for address in _plugin_addresses(spec)}
    return tuple(text for text in assignments if _assignment_address(text) not in addresses)


def leave_to_namesakes(
    spec: PluginSpec, assignments: Sequence[str], specs: Sequence[PluginSpec]
) -> tuple[str, ...]:
    """Leave out the assignments by a name that a plugin with options has too, if this has none.

    Attention and operations may both be called `triton`.
    """
    is_shared = any(other.name == spec.name and other.options is not None for other in specs)
    if spec.options is not None or not is_shared:
        return tuple(assignments)
    return tuple(text for text in assignments if _assignment_address(text) != spec.name)


def _plugin_addresses(spec: PluginSpec) -> tuple[str, str]:
    """The two addresses of a plugin in an assignment: its name, or its kind and name."""
    kind = next(kind for kind, spec_class in SPEC_CLASSES.items() if isinstance(spec, spec_class))
    return spec.name, f"{kind}:{spec.name}"


def _assignment_address(assignment: str) -> str:
    """The address in an assignment: all before the field."""
    # A value may have dots, as 0.5 has, so the text is cut at its first "=" before the last dot is
    # looked for.
    return assignment.partition("=")[0].rpartition(".")[0]


def _parse_assignment(assignment: str) -> tuple[str, str]:
    """Parse `NAME.FIELD=VALUE` into the field and the text.   raises: UsageError"""
    target, equals, text = assignment.partition("=")
    # Users write options as they write flags, with dashes.
    name = target.rpartition(".")[2].strip().replace("-", "_")
    if not equals or not name or not _assignment_address(assignment):
        raise UsageError(
            "opt (--opt): expected NAME.FIELD=VALUE, such as radix.max_prefixes=4, got "
            f"{shorten(assignment)!r}"
        )
    return name, text.strip()


def _option_fields(spec: PluginSpec) -> dict[str, attrs.Attribute[Any]]:
    """List the fields of the plugin's option class, types resolved.   raises: PluginBroken"""
    if spec.options is None:
        return {}
    cls = import_object(spec, spec.options)
    if not attrs.has(cls):
        raise PluginBroken(
            f"{plugin_label(spec)}: its option class {spec.options} is not an attrs class"
        )
    return {field.name: field for field in attrs.fields(attrs.resolve_types(cls))}


def _convert_option(
    spec: PluginSpec, fields: dict[str, attrs.Attribute[Any]], name: str, text: str
) -> Any:
    """Convert `text` to the field's type.

    Text for a field of another type is left to the field's converter, where it has one.

    raises: UsageError, PluginBroken when the field takes no text
    """
    if name not in fields:
        known_options = ", ".join(fields)
        raise UsageError(
            f"opt (--opt) {spec.name}.{shorten(name)}: no such option; {spec.name!r} has "
            f"{known_options}{suggest_name(name, fields)}"
        )
    try:
        return _parse_as_type(fields[name].type, text)
    except TypeError as error:
        # A converter reads text by rules of the plugin's own; the annotation says what it makes.
        if fields[name].converter is not None:
            return text
        readable_types = (
            "int, float, bool, str, Literal, an enum, one of these and None, or a converter"
        )
        raise PluginBroken(
            f"{plugin_label(spec)}: no text can be read for its option {name!r}: expected "
            f"{readable_types}, got {error}"
        ) from error
    except ValueError as error:
        raise UsageError(
            f"opt (--opt) {spec.name}.{name}: expected {error}, got {shorten(text)!r}"
        ) from error


def _parse_as_type(option_type: Any, text: str) -> Any:
    """Parse `text` as a bool, int, finite float, str, Literal, Enum or a union of these.

    raises: ValueError whose text names what is expected; TypeError for any other type
    """
    origin_type, members = typing.get_origin(option_type), typing.get_args(option_type)
    if origin_type in (typing.Union, types.UnionType):
        return _parse_as_union(members, text)
    if option_type is types.NoneType:
        return _look_up_word({"none": None}, text, "none")
    # Before numbers, and by words: bool("off") is true in Python.
    if option_type is bool:
        return _look_up_word(SWITCH_WORDS, text, f"one of {', '.join(SWITCH_WORDS)}")
    if origin_type is typing.Literal:
        return _look_up_word(
            {str(member): member for member in members},
            text,
            f"one of {', '.join(map(str, members))}",
        )
    if isinstance(option_type, type) and issubclass(option_type, Enum):
        return _look_up_word(
            {str(member.value): member for member in option_type},
            text,
            f"one of {', '.join(str(e.value) for e in option_type)}",
        )
    if option_type in (int, float):
        return parse_number(option_type, text)
    if option_type is str:
        return text
    raise TypeError(f"type {option_type}")


def _parse_as_union(members: Sequence[Any], text: str) -> Any:
    """Parse `text` as the first member type that takes it: None first, plain text last."""
    reasons = []
    # `int | str | None` would otherwise take every text, "none" included, as text.
    for member in sorted(members, key=lambda option: (option is str, option is not types.NoneType)):
        try:
            return _parse_as_type(member, text)
        except ValueError as error:
            reasons.append(str(error))
    raise ValueError(" or ".join(reasons))


def _look_up_word(values: dict[str, Any], text: str, expected: str) -> Any:
    """Look up the value that `text` names, in lower case first.   raises: ValueError"""
    if text.lower() in values:
        return values[text.lower()]
    if text in values:
        return values[text]
    raise ValueError(expected)


def parse_number(number_type: type[int] | type[float], text: str) -> int | float:
    """Parse `text` as a finite number.   raises: ValueError"""
    article = "an integer" if number_type is int else "a finite number"
    try:
        value = number_type(text)
    except ValueError:
        raise ValueError(article) from None
    # float() reads "nan" and "inf", which no option of a plugin means.
    if not math.isfinite(value):
        raise ValueError(article)
    return value
