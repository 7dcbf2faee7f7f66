"""The tools that a request offers, in the form of OpenAI's API, checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, TypeGuard

from headstock.errors import RequestError, describe_type, shorten
from headstock.spi import Tool

NAME: Final = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
KEYS: Final = ("name", "description", "parameters", "strict")
MAX_TOOLS: Final = 256


def check_tools(values: object) -> tuple[Mapping[str, object], ...]:
    """The tools; none for None.   raises: RequestError"""
    if values is None:
        return ()
    if not isinstance(values, list | tuple):
        raise _make_error("tools", "a list of tools", values)
    if len(values) > MAX_TOOLS:
        raise RequestError(
            f"tools has {len(values)} entries; at most {MAX_TOOLS} are taken", "tools"
        )
    tools = tuple(_check_tool(value, f"tools[{index}]") for index, value in enumerate(values))
    names = [tool.name for tool in list_tools(tools)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise RequestError(f"two tools are called {twice}; names must differ", "tools")
    return tools


def _check_tool(value: object, where: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise _make_error(where, 'an object {"type": "function", "function": {...}}', value)
    if value.get("type") != "function":
        raise RequestError(
            f"{where}.type: expected function, got {shorten(value.get('type'))}", "tools"
        )
    function = value.get("function")
    if not isinstance(function, Mapping):
        raise _make_error(f"{where}.function", "an object with a name", function)
    for place, keys, fields in (
        (where, value.keys(), ("type", "function")),
        (f"{where}.function", function.keys(), KEYS),
    ):
        unknown = next((key for key in keys if key not in fields), None)
        if unknown is not None:
            raise RequestError(
                f"{place}.{shorten(unknown)} is not a known field; known are {', '.join(fields)}",
                "tools",
            )
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise RequestError(
            f"{where}.function.name: expected 1 to 128 letters, digits or _ . : / -, got "
            f"{describe_type(name)}",
            "tools",
        )
    for key, kind, rule in (
        ("description", str, "text"),
        ("parameters", Mapping, "a JSON schema"),
        ("strict", bool, "true or false"),
    ):
        if function.get(key) is not None and not isinstance(function[key], kind):
            raise _make_error(f"{where}.function.{key}", rule, function[key])
    return value


def _make_error(where: str, rule: str, value: object) -> RequestError:
    return RequestError(f"{where}: expected {rule}, got {describe_type(value)}", "tools")


def list_tools(tools: tuple[Mapping[str, object], ...]) -> list[Tool]:
    """Checked tools as parsers get them."""
    functions = [tool["function"] for tool in tools]
    return [
        Tool(name=str(function["name"]), parameters=function.get("parameters") or {})
        for function in functions
        if isinstance(function, Mapping)
    ]


def list_strict_names(tools: tuple[Mapping[str, object], ...]) -> frozenset[str]:
    """The names of checked tools that are strict."""
    functions = (tool["function"] for tool in tools)
    return frozenset(
        str(function["name"])
        for function in functions
        if isinstance(function, Mapping) and function.get("strict")
    )


def list_offered_tools(
    choice: object, tools: tuple[Mapping[str, object], ...]
) -> tuple[Mapping[str, object], ...]:
    """The tools that the model may call: none with "none", and some with allowed_tools.

    raises: RequestError
    """
    if choice == "none":
        return ()
    if not _is_allowed_choice(choice):
        return tools
    _, names = _read_allowed_tools(choice)
    missing = next((name for name in names if name not in _list_names(tools)), None)
    if missing is not None:
        raise RequestError(
            f"tool_choice allows {shorten(missing)}, which is not among tools", "tool_choice"
        )
    return tuple(
        tool for tool, name in zip(tools, _list_names(tools), strict=True) if name in names
    )


def list_forced_tools(choice: object, tools: tuple[Mapping[str, object], ...]) -> list[Tool]:
    """The tools of which the model must call one; empty if it decides itself.

    raises: RequestError
    """
    offered = list_tools(list_offered_tools(choice, tools))
    if _is_allowed_choice(choice):
        mode, _ = _read_allowed_tools(choice)
        return offered if mode == "required" else []
    if choice is None or choice in ("auto", "none"):
        return []
    name = _read_forced_name(choice)
    if not offered:
        raise RequestError("tool_choice needs tools to choose from", "tool_choice")
    if choice == "required":
        return offered
    matches = [tool for tool in offered if tool.name == name]
    if not matches:
        raise RequestError(
            f"tool_choice names {shorten(name)}, which is not among tools", "tool_choice"
        )
    return matches


def _list_names(tools: tuple[Mapping[str, object], ...]) -> list[str]:
    return [tool.name for tool in list_tools(tools)]


def _is_allowed_choice(choice: object) -> TypeGuard[Mapping[str, object]]:
    return isinstance(choice, Mapping) and choice.get("type") == "allowed_tools"


def _read_allowed_tools(choice: Mapping[str, object]) -> tuple[str, list[str]]:
    """Whether a call is "required", or the model decides ("auto"); the tools that it may call.

    raises: RequestError
    """
    allowed = choice.get("allowed_tools")
    mode, tools = (
        (allowed.get("mode"), allowed.get("tools")) if isinstance(allowed, Mapping) else (None, ())
    )
    names = [_read_name(tool) for tool in tools] if isinstance(tools, list | tuple) else []
    if mode in ("auto", "required") and names and None not in names:
        return str(mode), [str(name) for name in names]
    raise RequestError(
        'tool_choice.allowed_tools: expected {"mode": "auto" or "required", "tools": [{"type": '
        f'"function", "function": {{"name": ...}}}}, ...]}}, got {shorten(allowed)}',
        "tool_choice",
    )


def _read_forced_name(choice: object) -> str:
    """ "required", or the name of the tool that must be called.   raises: RequestError"""
    if choice == "required":
        return "required"
    name = _read_name(choice)
    if name is not None:
        return name
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    raise RequestError(
        'tool_choice: expected none, auto, required or an object: {"type": "function", "function": '
        '{"name": ...}} or {"type": "allowed_tools", "allowed_tools": {...}}, got '
        + (f"type {shorten(kind)}" if kind else describe_type(choice)),
        "tool_choice",
    )


def _read_name(choice: object) -> str | None:
    """The name of the function that an object chooses; None where it chooses none."""
    if not isinstance(choice, Mapping) or choice.get("type", "function") != "function":
        return None
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None
