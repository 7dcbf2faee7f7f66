"""The page at `/`: a chat and a live view, in one answer that loads nothing from elsewhere."""

from __future__ import annotations

import secrets
from functools import cache
from importlib.resources import files
from string import Template

from starlette.responses import Response

SCRIPTS = ("chat.js", "live.js", "main.js")
"""In this order they make one script."""

POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
"""What the page may load and run: its own style and script, and calls to its own server."""


@cache
def read_template() -> Template:
    """The page but for its nonce."""
    folder = files(__package__) / "page"

    def read(name: str) -> str:
        return (folder / name).read_text("utf-8")

    scripts = "\n".join(map(read, SCRIPTS))
    # In a function: names such as `history` and `stop` are the browser's outside.
    parts = {"style": read("page.css"), "script": f'"use strict";\n(() => {{\n{scripts}\n}})();'}
    page = Template(read("page.html")).safe_substitute(
        # A `$` of the script's own is no place to fill.
        {name: text.replace("$", "$$") for name, text in parts.items()}
    )
    return Template(page)


def render_page() -> Response:
    """The page, under a policy with a nonce that no other answer has."""
    nonce = secrets.token_urlsafe(16)
    return Response(
        read_template().substitute(nonce=nonce),
        media_type="text/html",
        headers={
            "content-security-policy": POLICY.format(nonce=nonce),
            "cache-control": "no-store",
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
        },
    )
