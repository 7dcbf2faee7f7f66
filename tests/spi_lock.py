"""The contract as text: every public name of headstock.spi with its fields, members and signatures.

`python tests/spi_lock.py` rewrites core/spi.lock, which is done on purpose and with a change of
`headstock.spi.SPI`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import attrs

from headstock import spi

LOCK = Path(__file__).parents[1] / "core" / "spi.lock"


def lock_text() -> str:
    """The whole contract, one name after the other."""
    return "\n".join(
        line for name in sorted(spi.__all__) for line in [*entry(name, getattr(spi, name)), ""]
    )


def entry(name: str, value: object) -> Iterator[str]:
    """The lines of one public name."""
    if not inspect.isclass(value):
        shown = dict(value) if isinstance(value, Mapping) else value
        yield f"{name} = {shown!r}"
        return
    yield f"class {name}({', '.join(base.__name__ for base in value.__bases__)})"
    if issubclass(value, Enum):
        yield from (f"    {member.name} = {member.value!r}" for member in value)
        return
    if attrs.has(value):
        yield from (f"    {field_line(field)}" for field in attrs.fields(value))
    yield from methods(value)


def field_line(field: attrs.Attribute[Any]) -> str:
    """One field of a record: whether it is named in a call, its type and its default."""
    default = "" if field.default is attrs.NOTHING else f" = {default_of(field.default)}"
    return f"{'*, ' if field.kw_only else ''}{field.name}: {field.type}{default}"


def default_of(default: object) -> str:
    """A default as text that does not depend on the process."""
    return f"{default.factory.__name__}()" if isinstance(default, attrs.Factory) else repr(default)


def methods(cls: type) -> Iterator[str]:
    """The public methods that a class defines itself, and its constructor when it is not made by
    attrs.
    """
    for name, member in vars(cls).items():
        if name.startswith("_") and (name != "__init__" or attrs.has(cls)):
            continue
        kind, function = unwrapped(member)
        if function is not None:
            abstract = "abstract " if getattr(function, "__isabstractmethod__", False) else ""
            yield f"    {abstract}{kind}{name}{inspect.signature(function)}"


def unwrapped(member: object) -> tuple[str, Callable[..., Any] | None]:
    """How a member is bound, and the function behind it."""
    match member:
        case property():
            return "property ", member.fget
        case classmethod():
            return "classmethod ", member.__func__
        case staticmethod():
            return "staticmethod ", member.__func__
    return "", member if inspect.isfunction(member) else None


if __name__ == "__main__":
    LOCK.write_text(lock_text())
