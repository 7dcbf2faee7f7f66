"""Convert the tools of `/v1/responses` to those of a chat, which has no namespaces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from attrs import frozen

from headstock.errors import shorten
from headstock_openai_server.api.errors import refuse
from headstock_openai_server.api.ignored import IgnoredFields
from headstock_openai_server.api.responses_body import (
    FunctionTool,
    NamespaceTool,
    ResponsesToolChoice,
)
from headstock_openai_server.api.schema import (
    AllowedTools,
    ChosenFunction,
    ChosenTool,
    FunctionBody,
    ToolBody,
    ToolChoice,
)
from headstock_openai_server.api.strict_schemas import check_strict
from headstock_openai_server.api.validation import convert_part


@frozen
class FunctionName:
    """The name of a function and of its namespace, if any."""

    name: str
    namespace: str | None = None

    @property
    def flat(self) -> str:
        """The name that the model sees."""
        # Clients name the tools of MCP servers like this without namespaces; some names end in it.
        return (
            self.name
            if self.namespace is None
            else f"{self.namespace.removesuffix('__')}__{self.name}"
        )


def make_tools(
    tools: Sequence[dict[str, Any]], ignored: IgnoredFields
) -> tuple[list[ToolBody], dict[str, FunctionName]]:
    """The functions, and their names for clients by the names that the model sees; `ignored` gets
    fields without effect.

    raises: ApiError for server-side tools, which do not exist here
    """
    made: list[ToolBody] = []
    names: dict[str, FunctionName] = {}

    def add(function: FunctionTool, name: FunctionName, where: str, heading: str = "") -> None:
        if name.flat in names:
            raise refuse(f"two tools are called {shorten(name.flat)}; names must differ", where)
        if function.strict:
            check_strict(function.parameters, f"{where}.parameters")
        names[name.flat] = name
        description = "\n\n".join(filter(None, (heading, function.description)))
        body = FunctionBody(
            name=name.flat,
            description=description or function.description,
            parameters=function.parameters,
            strict=function.strict,
        )
        made.append(ToolBody(type="function", function=body))

    for index, tool in enumerate(tools):
        where, kind = f"tools[{index}]", tool.get("type")
        if kind == "function":
            function = convert_part(tool, FunctionTool, where, ignored)
            add(function, FunctionName(function.name), where)
        elif kind == "namespace":
            _check_functions(tool.get("tools"), f"{where}.tools")
            namespace = convert_part(tool, NamespaceTool, where, ignored)
            for at, function in enumerate(namespace.tools):
                # The namespace's description precedes that of its first function, like a heading.
                heading = (namespace.description or "") if at == 0 else ""
                name = FunctionName(function.name, namespace.name)
                add(function, name, f"{where}.tools[{at}]", heading)
        else:
            raise _refuse_kind(kind, f"{where}.type", "function and namespace are")
    return made, names


def _check_functions(tools: object, where: str) -> None:
    """Raise ApiError for a tool in a namespace that is not a function."""
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        if isinstance(tool, dict) and tool.get("type") != "function":
            raise _refuse_kind(tool.get("type"), f"{where}[{index}].type", "function is")


def _refuse_kind(kind: object, where: str, served: str) -> Exception:
    return refuse(
        f"{where} {shorten(kind)} is not supported; only {served}: turn the others off in the "
        "client",
        where,
        "unsupported",
    )


ToolChoiceWord = Literal["none", "auto", "required"]


def make_tool_choice(
    choice: ToolChoiceWord | ResponsesToolChoice | None,
) -> ToolChoiceWord | ToolChoice | None:
    """The choice in the form of a chat.   raises: ApiError"""
    if not isinstance(choice, ResponsesToolChoice):
        return choice
    if choice.type not in ("function", "allowed_tools"):
        raise refuse(
            f"tool_choice.type {shorten(choice.type)} is not supported; served: function, "
            "allowed_tools",
            "tool_choice.type",
            "unsupported",
        )
    needed = ("name",) if choice.type == "function" else ("mode", "tools")
    for name in needed:
        if getattr(choice, name) is None:
            where = f"tool_choice.{name}"
            raise refuse(f"{where} is missing", where, "missing_required_parameter")
    if choice.type == "function":
        flat = FunctionName(choice.name or "", choice.namespace).flat
        return ToolChoice(function=ChosenFunction(name=flat))
    allowed = [
        ChosenTool(
            type="function",
            function=ChosenFunction(name=FunctionName(each.name, each.namespace).flat),
        )
        for each in choice.tools or ()
    ]
    return ToolChoice(
        type="allowed_tools", allowed_tools=AllowedTools(mode=choice.mode or "auto", tools=allowed)
    )
