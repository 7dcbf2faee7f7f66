"""The page at `/`: a chat and a live view, in one response without external resources."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from string import Template
from typing import Any

from starlette.responses import Response

from headstock_openai_server.http.document_page import write_document

LIBRARIES = ("marked.umd.js", "purify.min.js", "highlight.min.js", "temml.min.js")
"""Scripts of others, as published."""
SCRIPTS = (
    *("turns.js", "versions.js", "math.js", "markdown.js", "store.js", "transfer.js"),
    *("conversations.js", "samplers.js", "progress.js", "chat.js", "files.js", "drawings.js"),
    *("live.js", "main.js"),
)
"""The parts of the script, in order."""

POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
"""The content security policy: own style and script, and calls to the own server."""


@cache
def read_template() -> Template:
    """The page without its nonce."""
    folder = files(__package__) / "page"

    def read(name: str) -> str:
        return (folder / name).read_text("utf-8")

    libraries = [quote_comments(read(f"vendor/{name}")) for name in LIBRARIES]
    scripts = "\n".join((*libraries, *map(read, SCRIPTS)))
    # In a function, since names such as `history` and `stop` are globals of the browser.
    parts = {"style": read("page.css"), "script": f'"use strict";\n(() => {{\n{scripts}\n}})();'}
    page = Template(read("page.html")).safe_substitute(
        # A `$` in the script is not a placeholder.
        {name: text.replace("$", "$$") for name, text in parts.items()}
    )
    return Template(page)


def quote_comments(script: str) -> str:
    """The script without text that means something in a page: `<!--`, and the name of its map."""
    return re.sub(r"^//# sourceMappingURL=.*$", "", script, flags=re.MULTILINE).replace(
        "<!--", "<\\!--"
    )


STATIC_POLICY = (
    "default-src 'none'; style-src 'nonce-{nonce}'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
"""The policy of a page without scripts."""


def render_page() -> Response:
    """The page, under a policy with a unique nonce."""
    nonce = secrets.token_urlsafe(16)
    return send_page(read_template().substitute(nonce=nonce), POLICY.format(nonce=nonce))


def render_document(document: Mapping[str, Any]) -> Response:
    """The page of an OpenAPI document, under a policy with a unique nonce."""
    nonce = secrets.token_urlsafe(16)
    return send_page(write_document(document, nonce), STATIC_POLICY.format(nonce=nonce))


def send_page(html: str, policy: str) -> Response:
    """A page under a content security policy."""
    return Response(
        html,
        media_type="text/html",
        headers={
            "content-security-policy": policy,
            "cache-control": "no-store",
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
        },
    )
