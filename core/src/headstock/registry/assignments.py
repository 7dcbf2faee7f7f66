"""A plugin's own options: `--opt NAME.FIELD=VALUE`, turned into an instance of the attrs class that
its spec names.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any

import attrs

from headstock.config.value_types import SWITCH_WORDS
from headstock.errors import PluginBroken, UsageError, shorten
from headstock.registry.entries import suggestion
from headstock.registry.loading import SPECS, imported, origin
from headstock.spi import PluginSpec


def options(spec: PluginSpec, assignments: Sequence[str] = ()) -> Any:
    """The plugin's options with the assignments meant for it applied, the last one winning; None
    when it has none.

    raises: UsageError for an unknown field or a bad value, PluginBroken when the option class is
        not usable
    """
    mine = [parse(each) for each in assignments if owner(each) in owners(spec)]
    if spec.options is None:
        if mine:
            raise UsageError(
                f"--opt {shorten(spec.name)}.{shorten(mine[0][0])}: {spec.name!r} has no options"
            )
        return None
    fields = option_fields(spec)
    values = {name: convert(spec, fields, name, text) for name, text in mine}
    try:
        return imported(spec, spec.options)(**values)
    except (TypeError, ValueError) as error:
        raise UsageError(f"--opt {spec.name}: {shorten(error)}") from error


def unclaimed(assignments: Iterable[str], specs: Sequence[PluginSpec]) -> tuple[str, ...]:
    """The assignments that are for none of these plugins."""
    known = {each for spec in specs for each in owners(spec)}
    return tuple(each for each in assignments if owner(each) not in known)


def owners(spec: PluginSpec) -> tuple[str, str]:
    """The two ways to address a plugin in an assignment: by name, or by kind and name."""
    kind = next(kind for kind, wanted in SPECS.items() if isinstance(spec, wanted))
    return spec.name, f"{kind}:{spec.name}"


def owner(assignment: str) -> str:
    """Whom an assignment is for."""
    return assignment.partition("=")[0].rpartition(".")[0]


def parse(assignment: str) -> tuple[str, str]:
    """The field and the text of `NAME.FIELD=VALUE`.   raises: UsageError"""
    target, equals, text = assignment.partition("=")
    name = target.rpartition(".")[2].strip().replace("-", "_")
    if not equals or not name or not owner(assignment):
        raise UsageError(
            f"--opt {shorten(assignment)!r}: wanted NAME.FIELD=VALUE, such as radix.max_prefixes=4"
        )
    return name, text.strip()


def option_fields(spec: PluginSpec) -> dict[str, attrs.Attribute[Any]]:
    """The fields of the plugin's option class, types resolved.   raises: PluginBroken"""
    if spec.options is None:
        return {}
    cls = imported(spec, spec.options)
    if not attrs.has(cls):
        raise PluginBroken(f"{origin(spec)}: its option class {spec.options} is not an attrs class")
    return {each.name: each for each in attrs.fields(attrs.resolve_types(cls))}


def convert(spec: PluginSpec, fields: dict[str, attrs.Attribute[Any]], name: str, text: str) -> Any:
    """`text` as the field's type; as it is for a field of another type whose converter will read
    it.

    raises: UsageError, PluginBroken when the field takes no text
    """
    if name not in fields:
        known = ", ".join(fields)
        raise UsageError(
            f"--opt {spec.name}.{shorten(name)}: no such option{suggestion(name, fields)}; "
            f"{spec.name!r} has {known}"
        )
    try:
        return as_type(fields[name].type, text)
    except TypeError as error:
        if fields[name].converter is not None:
            return text
        wanted = "int, float, bool, str, Literal, an enum, one of these and None, or a converter"
        raise PluginBroken(
            f"{origin(spec)}: no text can be read for its option {name!r}: {error} {wanted}"
        ) from error
    except ValueError as error:
        raise UsageError(
            f"--opt {spec.name}.{name}: got {shorten(text)!r}, wanted {error}"
        ) from error


def as_type(wanted: Any, text: str) -> Any:
    """`text` as a bool, int, finite float, str, Literal, Enum or a union of these.

    raises: ValueError whose text is what was wanted; TypeError for any other type
    """
    origin_type, members = typing.get_origin(wanted), typing.get_args(wanted)
    if origin_type in (typing.Union, types.UnionType):
        return first_that_fits(members, text)
    if wanted is types.NoneType:
        return parsed({"none": None}, text, "none")
    if wanted is bool:
        return parsed(SWITCH_WORDS, text, f"one of {', '.join(SWITCH_WORDS)}")
    if origin_type is typing.Literal:
        return parsed(
            {str(each): each for each in members}, text, f"one of {', '.join(map(str, members))}"
        )
    if isinstance(wanted, type) and issubclass(wanted, Enum):
        return parsed(
            {str(each.value): each for each in wanted},
            text,
            f"one of {', '.join(str(e.value) for e in wanted)}",
        )
    if wanted in (int, float):
        return number(wanted, text)
    if wanted is str:
        return text
    raise TypeError(f"it is of type {wanted}, wanted")


def first_that_fits(members: Sequence[Any], text: str) -> Any:
    """`text` as the first member type that takes it, None before the others and plain text last."""
    reasons = []
    for member in sorted(members, key=lambda each: (each is str, each is not types.NoneType)):
        try:
            return as_type(member, text)
        except ValueError as error:
            reasons.append(str(error))
    raise ValueError(" or ".join(reasons))


def parsed(values: dict[str, Any], text: str, wanted: str) -> Any:
    """The value that `text` names."""
    if text.lower() in values:
        return values[text.lower()]
    if text in values:
        return values[text]
    raise ValueError(wanted)


def number(wanted: type[int] | type[float], text: str) -> int | float:
    """`text` as a finite number."""
    article = "an integer" if wanted is int else "a finite number"
    try:
        value = wanted(text)
    except ValueError:
        raise ValueError(article) from None
    if not math.isfinite(value):
        raise ValueError(article)
    return value
