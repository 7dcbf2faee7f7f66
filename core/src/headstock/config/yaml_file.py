"""Settings in YAML: plain data only, by YAML 1.2's rules for plain words, each key once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, ClassVar

import yaml

from headstock.errors import shorten

DECIMAL = r"-?(0|[1-9][0-9]*)"
SCALARS = {
    "null": (r"~|null|Null|NULL|", ("~", "n", "N", "")),
    "bool": (r"true|True|TRUE|false|False|FALSE", tuple("tTfF")),
    "int": (DECIMAL, tuple("-0123456789")),
    "float": (
        rf"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|{DECIMAL}[eE][-+]?[0-9]+|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        tuple("-+.0123456789"),
    ),
}
"""Tag -> which plain words have it, and their first characters; all others are text.

YAML 1.1, which PyYAML reads by itself, takes `off` for false, 010 for 8, 1:30 for 90 and 2026-11-22
for a date.
"""


class _SettingsLoader(yaml.SafeLoader):
    """Loads plain values with text as keys; a repeated key and an alias are errors.

    A few nested aliases can stand for more data than fits any memory.
    """

    # A separate table: add_implicit_resolver would copy the rules of YAML 1.1 from SafeLoader.
    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # type: ignore[misc]  # the stubs take it for an instance's

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            message = f"an alias (*{shorten(event.anchor)}) is not supported; write the value out"
            raise yaml.composer.ComposerError(None, None, message, event.start_mark)
        return super().compose_node(parent, index)

    def construct_table(self, node: yaml.MappingNode) -> Iterator[dict[str, object]]:
        """The mapping, first empty and then filled, as PyYAML wants it of what can hold itself."""
        table: dict[str, object] = {}
        yield table
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self.refuse("expected one word or text as a key", key_node)
            key = str(key_node.value)
            if key in table:
                self.refuse(f"key {shorten(key)} comes twice", key_node)
            table[key] = self.construct_object(value_node, deep=True)

    def refuse(self, message: str, node: yaml.Node) -> None:
        """Raise the error at a node."""
        raise yaml.constructor.ConstructorError(None, None, message, node.start_mark)


for _name, (_words, _first) in SCALARS.items():
    _SettingsLoader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_name}", re.compile(rf"(?:{_words})\Z"), list(_first)
    )
_SettingsLoader.add_constructor("tag:yaml.org,2002:map", _SettingsLoader.construct_table)


def read_yaml(text: str) -> object:
    """The value of the one document in `text`; an empty mapping for an empty text.

    raises: ValueError
    """
    try:
        value = _SettingsLoader(text).get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = "" if mark is None else f", at line {mark.line + 1}, column {mark.column + 1}"
        raise ValueError(f"{shorten(error.problem)}{where}") from error
    except yaml.YAMLError as error:
        raise ValueError(shorten(error)) from error
    return {} if value is None else value
