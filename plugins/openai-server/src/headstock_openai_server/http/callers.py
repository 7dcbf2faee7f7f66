"""Who may call the server: the names by which browsers reach it, and the pages that may use it."""

from __future__ import annotations

from collections.abc import Container, Iterable
from ipaddress import ip_address

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from headstock_openai_server.settings import ServerSettings

PREFLIGHT_SECONDS = 600
"""How long a browser need not ask again whether a page may call the server."""
SHOWN_HEADERS = ("request-id", "retry-after", "x-ignored-fields", "x-request-id")
"""Headers of answers that pages of other origins can read."""
PAGE_HEADERS = ("origin", "referer", "sec-fetch-dest", "sec-fetch-mode", "sec-fetch-site")
"""Headers that browsers send with a page's requests and that pages cannot leave out."""


def allow_pages(app: ASGIApp, settings: ServerSettings) -> ASGIApp:
    """The application for pages of the allowed origins too.

    Browsers ask before a page's first call, without its key: that question is answered here.
    """
    if not settings.allow_origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=settings.allow_origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        allow_private_network=True,
        expose_headers=SHOWN_HEADERS,
        max_age=PREFLIGHT_SECONDS,
    )


class HostCheck:
    """The names by which a server without a key may be called.

    A page can have its own name resolved to the server's address once it is open ("DNS
    rebinding"), and browsers then take the server for the page's own. The name stays in `Host`.
    """

    def __init__(self, names: Iterable[str]) -> None:
        lowered = [name.lower() for name in names]
        self.names = frozenset(lowered)
        self.endings = tuple(name for name in (".localhost", *lowered) if name.startswith("."))

    def allows(self, host: bytes) -> bool:
        """Whether a `Host` header is a numeric address, this machine's own, or one of the names."""
        name = read_name(host)
        return (
            name == "localhost"
            or name in self.names
            or name.endswith(self.endings)
            or is_address(name)
        )


def is_from_page(names: Container[str]) -> bool:
    """Whether a request with headers of these names may come from a page in a browser.

    Every POST of a page has at least `Origin`, which is "null" where the page hides its own.
    """
    return any(name in names for name in PAGE_HEADERS)


def read_name(host: bytes) -> str:
    """The name or the address of a `Host` header, in lower case, without its port."""
    text = host.decode("latin-1").lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0].removesuffix(".")


def is_address(name: str) -> bool:
    """Whether the name is a numeric address, which no page can have as a name of its own."""
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def make_host_check(settings: ServerSettings) -> HostCheck | None:
    """The check of a server's settings; None where a key or a socket's permissions do more."""
    if settings.api_keys or settings.uds:
        return None
    return HostCheck((settings.host, *settings.allowed_hosts))
