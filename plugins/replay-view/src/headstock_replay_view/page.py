"""The page: the computed data and the files that draw it as one text, with nothing loaded from
elsewhere.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from headstock_replay_view.page_text import list_facts, list_slowest, list_tiles

SCRIPTS = ("model.js", "canvas.js", "lanes.js", "charts.js", "tree.js", "readout.js", "controls.js")
"""In this order they are one script."""


def render_page(data: Mapping[str, Any]) -> str:
    """The page's text; whatever the data says is shown as text and never run."""
    # Imported here, for a replay without a page does not need it.
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    style, script = _read_asset("page.css"), "".join(map(_read_asset, SCRIPTS))
    script = f'"use strict";\n(() => {{\n{script}}})();\n'
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


def _read_asset(name: str) -> str:
    """The text of a file that draws."""
    return files("headstock_replay_view").joinpath("assets", name).read_text("utf-8")


def make_content_policy(style: str, script: str) -> str:
    """A content security policy under which only this style and this script count, and nothing is
    loaded.
    """
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
    """The data as JSON in which no text can end the element that it stands in."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
