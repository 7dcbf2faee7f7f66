"""The page: data, style and scripts in one text without external resources."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from headstock_replay_view.page_text import list_facts, list_slowest, list_tiles

SCRIPTS = ("model.js", "canvas.js", "lanes.js", "charts.js", "tree.js", "readout.js", "controls.js")
"""The parts of the script, in order."""

BY_SWITCH = ':root[data-theme="dark"]'
"""The selector of the dark theme in dark.css."""


def render_html(data: Mapping[str, Any]) -> str:
    """Return the text of the page; texts of the recording are escaped and never run."""
    # imported here: a trace does not need templates
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    style, script = _make_style(), "".join(map(_read_asset, SCRIPTS))
    script = f'"use strict";\n(() => {{\n{script}}})();\n'
    # In the sandbox, like chat templates: every environment of the project has one.
    environment = ImmutableSandboxedEnvironment(autoescape=True, undefined=StrictUndefined)
    return environment.from_string(_read_asset("page.html")).render(
        data=data,
        facts=list_facts(data),
        tiles=list_tiles(data["headline"]),
        slowest=list_slowest(data),
        policy=make_content_policy(style, script),
        style=style,
        script=script,
        json=escape_json(data),
    )


def _make_style() -> str:
    """Return the style sheet; the switch or the system's preference activates the dark theme."""
    dark = _read_asset("dark.css")
    by_system = dark.replace(BY_SWITCH, ':root:not([data-theme="light"])')
    return f"{_read_asset('page.css')}{dark}@media (prefers-color-scheme: dark) {{\n{by_system}}}\n"


def _read_asset(name: str) -> str:
    """Return the text of an asset."""
    return files("headstock_replay_view").joinpath("assets", name).read_text("utf-8")


def make_content_policy(style: str, script: str) -> str:
    """Return a content security policy that only allows this style and this script."""
    # Hashes, not nonces: the page is a file, without a server to make a nonce per reader.
    hashes = [
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for text in (style, script)
    ]
    rules = (
        "default-src 'none'",
        f"style-src 'sha256-{hashes[0]}'",
        f"script-src 'sha256-{hashes[1]}'",
    )
    return "; ".join((*rules, "base-uri 'none'", "form-action 'none'"))


def escape_json(data: Mapping[str, Any]) -> str:
    """Return the data as JSON that cannot end the script element around it."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
