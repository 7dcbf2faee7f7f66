"""The page at `/docs`: the OpenAPI document for people, without scripts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

Schema = Mapping[str, Any]

STYLE = """\
:root { color-scheme: light dark; }
body { margin: 0 auto; max-width: 60rem; padding: 1rem; font: 15px/1.5 system-ui, sans-serif; }
h2 { margin: 2.5rem 0 0; font-size: 1.2rem; }
h3 { margin: 1.5rem 0 .2rem; font-size: 1rem; }
p { margin: .2rem 0; }
.table { overflow-x: auto; }
table { border-collapse: collapse; margin: .4rem 0; }
th, td { text-align: left; vertical-align: top; padding: .15rem 1rem .15rem 0; }
th { font: .9rem ui-monospace, monospace; }
tr + tr > * { border-top: 1px solid #8886; }
code { font: .95rem ui-monospace, monospace; }
"""


def write_document(document: Mapping[str, Any], nonce: str = "") -> str:
    """The page of a document; `nonce` allows its style."""
    info = document["info"]
    schemas: Mapping[str, Schema] = document["components"]["schemas"]
    body = "\n".join(
        [
            f"<h1>{escape(info['title'])} {escape(info['version'])}</h1>",
            '<p>The same as <a href="openapi.json">openapi.json</a>, which may need a key.</p>',
            "<h2>Routes</h2>",
            *(
                _write_operation(method, path, operation)
                for path, methods in document["paths"].items()
                for method, operation in methods.items()
            ),
            "<h2>Statuses</h2>",
            _write_table(sorted(_list_statuses(document).items())),
            "<h2>Objects</h2>",
            *(_write_schema(name, schemas[name]) for name in sorted(schemas)),
        ]
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(info['title'])}: routes and objects</title>\n"
        f'<style nonce="{escape(nonce)}">\n{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n'
        "</html>\n"
    )


def _write_operation(method: str, path: str, operation: Mapping[str, Any]) -> str:
    """A route, with links to its bodies."""
    lines = [
        f"<h3>{escape(method.upper())} <code>{escape(path)}</code></h3>",
        f"<p>{escape(operation['summary'])}</p>",
    ]
    if "requestBody" in operation:
        lines.append(f"<p>takes {_write_content(operation['requestBody'])}</p>")
    # Most statuses have the same body.
    statuses: dict[str, list[str]] = {}
    for status, answer in sorted(operation["responses"].items()):
        statuses.setdefault(_write_content(answer), []).append(status)
    rows = [(" ".join(those), content) for content, those in statuses.items()]
    return "\n".join([*lines, _write_table(rows)])


def _list_statuses(document: Mapping[str, Any]) -> dict[str, str]:
    """What each status says, as HTML."""
    return {
        status: escape(answer.get("description", ""))
        for methods in document["paths"].values()
        for operation in methods.values()
        for status, answer in operation["responses"].items()
    }


def _write_content(part: Mapping[str, Any]) -> str:
    """The types of a body, each with its media type."""
    return " or ".join(
        f"{_spell(content['schema'])} ({escape(kind)})"
        if content["schema"]
        else f"<code>{escape(kind)}</code>"
        for kind, content in part.get("content", {}).items()
    )


def _write_schema(name: str, schema: Schema) -> str:
    """An object and its fields."""
    required = schema.get("required", ())
    rows = [
        (field, ", ".join([_spell(part), *_list_notes(part, is_required=field in required)]))
        for field, part in schema.get("properties", {}).items()
    ]
    about = escape(schema.get("description", ""))
    return f'<h3 id="{escape(name)}">{escape(name)}</h3>\n<p>{about}</p>\n{_write_table(rows)}'


def _list_notes(part: Schema, *, is_required: bool) -> Iterator[str]:
    """What is to say of a field besides its type."""
    if is_required:
        yield "required"
    elif part.get("default") is not None:
        yield f"default {_write_value(part['default'])}"
    if "description" in part:
        yield escape(part["description"])


def _write_table(rows: list[tuple[str, str]]) -> str:
    """A table; the second cells are HTML."""
    lines = "\n".join(f"<tr><th>{escape(name)}</th><td>{cell}</td></tr>" for name, cell in rows)
    return f'<div class="table"><table>\n{lines}\n</table></div>' if rows else ""


def _spell(schema: Schema) -> str:
    """A type in words, with links to objects."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " or ".join(map(_spell, schema[key]))
    if "enum" in schema:
        return " or ".join(map(_write_value, schema["enum"]))
    if "const" in schema:
        return _write_value(schema["const"])
    kind = schema.get("type", "any value")
    if kind == "array":
        return f"list of {_spell(schema.get('items') or {})}"
    values = schema.get("additionalProperties")
    if kind == "object" and isinstance(values, dict) and values:
        return f"object of {_spell(values)}"
    return escape(kind if isinstance(kind, str) else " or ".join(kind))


def _write_value(value: object) -> str:
    return f"<code>{escape(json.dumps(value))}</code>"
