"""The public names of packages as the text of a Python stub, which `ast.parse` reads back.

A record's fields are annotated names, keyword-only ones after `_: KW_ONLY`.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import cached_property
from importlib import import_module
from types import ModuleType
from typing import Any

import attrs

SPECIAL_METHODS = ("__call__", "__contains__", "__enter__", "__getitem__", "__iter__", "__len__")
"""What a plugin may call of a class beside its public methods and its constructor."""


def make_stub(package: ModuleType, skip: frozenset[str] = frozenset()) -> str:
    """The stub of a package: a section for it and for each module that its `__all__` names."""
    entries, sections = [], []
    for name in sorted(public_names(package)):
        value = find_value(package, name)
        if isinstance(value, ModuleType):
            sections.append(make_stub(value))
        elif name not in skip:
            entries += ["", *describe(name, value)]
    own = [f"module = {package.__name__!r}", *entries, ""] if entries else []
    return "\n".join([*own, *sections])


def find_value(package: ModuleType, name: str) -> object:
    """The value of a public name, a module of the package imported for it where needed."""
    if not hasattr(package, name):
        import_module(f"{package.__name__}.{name}")
    return getattr(package, name)


def public_names(module: ModuleType) -> list[str]:
    """The names in `__all__`; without one, those that the module itself defines for others."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    names = []
    for node in ast.parse(inspect.getsource(module)).body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.append(name)
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                names.append(name)
    return [name for name in names if not name.startswith("_") and name not in ("LOG", "T")]


def find_origins(package: ModuleType) -> dict[str, str]:
    """Public name -> the module that the package imports it from."""
    return {
        (alias.asname or alias.name): node.module or ""
        for node in ast.parse(inspect.getsource(package)).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def describe(name: str, value: object) -> Iterator[str]:
    """The lines of one public name."""
    if inspect.isclass(value):
        yield from describe_class(name, value)
    elif inspect.isfunction(inspect.unwrap(value) if callable(value) else value):
        yield describe_function(name, value)
    # What a table holds is no part of the contract; that it is there, and its type, are.
    elif isinstance(value, Mapping | list | tuple | set | frozenset):
        yield f"{name}: {type(value).__name__}"
    elif isinstance(value, bool | int | float | str):
        yield f"{name}: {type(value).__name__} = {value!r}"
    else:
        yield f"{name} = {alias_text(value)}"


def alias_text(value: object) -> str:
    """An alias of a type as source, or the name of the value's type."""
    return readable(repr(value).replace("typing.", "").replace("collections.abc.", ""), value)


def readable(text: str, value: object) -> str:
    """The text where it is Python, else the name of the value's type."""
    try:
        ast.parse(text, mode="eval")
    except SyntaxError:
        return type(value).__name__
    return text


def describe_class(name: str, cls: type) -> Iterator[str]:
    """A class: its bases, fields or members, and the public methods that it defines itself."""
    bases = ", ".join(base.__name__ for base in cls.__bases__ if base is not object)
    body = [*class_body(cls)] or ["..."]
    yield f"class {name}({bases}):" if bases else f"class {name}:"
    yield from (f"    {line}" for line in body)


def class_body(cls: type) -> Iterator[str]:
    """The lines in a class."""
    if issubclass(cls, Enum):
        yield from (f"{member.name} = {member.value!r}" for member in cls)
    elif attrs.has(cls):
        yield from record_fields(cls)
    elif issubclass(cls, tuple) and hasattr(cls, "_fields"):
        defaults = getattr(cls, "_field_defaults", {})
        for name in cls._fields:
            default = f" = {value_text(defaults[name])}" if name in defaults else ""
            yield f"{name}: {annotation_text(cls.__annotations__[name])}{default}"
        return
    for name, member in vars(cls).items():
        if is_public_member(cls, name):
            yield from describe_member(name, member)


def is_public_member(cls: type, name: str) -> bool:
    """Whether plugins may rely on a member of the class."""
    if name == "__init__":
        return not attrs.has(cls) and not issubclass(cls, Enum)
    return name in SPECIAL_METHODS or not name.startswith("_")


def record_fields(cls: type) -> Iterator[str]:
    """The fields of an attrs class, those by position first."""
    fields = [field for field in attrs.fields(cls) if field.init]
    for keyword_only in (False, True):
        chosen = [field for field in fields if field.kw_only is keyword_only]
        if keyword_only and chosen:
            yield "_: KW_ONLY"
        for field in chosen:
            default = "" if field.default is attrs.NOTHING else f" = {default_text(field.default)}"
            yield f"{field.alias}: {annotation_text(field.type)}{default}"


def default_text(default: object) -> str:
    """A field's default; of a factory its name."""
    if isinstance(default, attrs.Factory):  # type: ignore[arg-type]  # a class, typed as a function
        return f"{getattr(default, 'factory').__name__}()"  # noqa: B009
    return value_text(default)


def value_text(value: object) -> str:
    """A value as source that depends on no process."""
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(value_text, value)))}}}" if value else "frozenset()"
    if isinstance(value, tuple | list):
        return f"({''.join(f'{value_text(item)}, ' for item in value)})"
    if isinstance(value, type) or inspect.isfunction(value):
        return value.__qualname__.replace("<", "").replace(">", "")
    text = repr(value)
    return type(value).__name__ if " at 0x" in text else readable(text, value)


def annotation_text(annotation: object) -> str:
    """A type as source."""
    if isinstance(annotation, str):
        return annotation
    if annotation is type(None) or annotation is None:
        return "None"
    return annotation.__name__ if inspect.isclass(annotation) else alias_text(annotation)


def describe_member(name: str, member: object) -> Iterator[str]:
    """A method with its decorators, or another attribute of a class."""
    decorator, function = unwrap_member(member)
    if function is None:
        if not attrs.has(type(member)) and isinstance(member, bool | int | float | str | tuple):
            yield f"{name} = {value_text(member)}"
        return
    if decorator:
        yield f"@{decorator}"
    if getattr(function, "__isabstractmethod__", False):
        yield "@abstractmethod"
    yield describe_function(name, function)


def unwrap_member(member: object) -> tuple[str, Callable[..., Any] | None]:
    """How a member is bound, and the function behind it."""
    match member:
        case property():
            return "property", member.fget
        case cached_property():
            return "property", member.func
        case classmethod():
            return "classmethod", member.__func__
        case staticmethod():
            return "staticmethod", member.__func__
    return "", member if inspect.isfunction(member) else None


def describe_function(name: str, function: Any) -> str:
    """A function's signature on one line."""
    signature = inspect.signature(function)
    texts, star = [], False
    parameters = list(signature.parameters.values())
    for at, parameter in enumerate(parameters):
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            texts.append("*")
            star = True
        star |= parameter.kind is parameter.VAR_POSITIONAL
        texts.append(parameter_text(parameter))
        following = parameters[at + 1].kind if at + 1 < len(parameters) else None
        if parameter.kind is parameter.POSITIONAL_ONLY and following is not parameter.kind:
            texts.append("/")
    returns = (
        ""
        if signature.return_annotation is signature.empty
        else f" -> {annotation_text(signature.return_annotation)}"
    )
    return f"def {name}({', '.join(texts)}){returns}: ..."


def parameter_text(parameter: inspect.Parameter) -> str:
    """A parameter with its type and default."""
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    annotation = (
        ""
        if parameter.annotation is parameter.empty
        else f": {annotation_text(parameter.annotation)}"
    )
    default = "" if parameter.default is parameter.empty else f" = {value_text(parameter.default)}"
    return f"{stars}{parameter.name}{annotation}{default}"
