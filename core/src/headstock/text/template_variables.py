"""The variables that a chat template reads."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING

from headstock.errors import RequestError, find_nearest_name, shorten
from headstock.logs import log_event

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

LOG = logging.getLogger(__name__)

MAX_NOTICES = 64
"""How many names are said of an engine: clients choose them."""

MAX_SLIP = 2
"""How many characters a slip may add or leave out."""


def make_environment() -> ImmutableSandboxedEnvironment:
    """The sandbox that parses templates, with the tags that transformers has."""
    # Only here: the command line imports this module for --help too.
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The tag that marks an assistant's words in templates; transformers adds it too."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return ImmutableSandboxedEnvironment(extensions=[Generation, "jinja2.ext.loopcontrols"])


# Each request with variables asks, and a large template takes 20 ms to parse.
@lru_cache(maxsize=8)
def list_variables(template: str) -> frozenset[str] | None:
    """The variables that a template reads before it sets them; None for a broken template."""
    from jinja2 import TemplateError, meta

    try:
        return frozenset(meta.find_undeclared_variables(make_environment().parse(template)))
    # Rendering says what is wrong with it. It is untrusted, and the parser recurses.
    except (TemplateError, RecursionError):
        return None


def find_unread(names: Iterable[str], template: str) -> list[str]:
    """List the variables that the template does not read.

    raises: RequestError for one that looks like a slip for another, which it reads
    """
    names = list(names)
    read = list_variables(template) if names else None
    if read is None:
        return []
    unread = [name for name in names if name not in read]
    for name in unread:
        near = find_nearest_name(name, sorted(read - set(names)))
        # A name that begins another one is that of another model's template: thinking,
        # thinking_budget.
        if near is not None and abs(len(near) - len(name)) <= MAX_SLIP:
            raise RequestError(
                f"chat_template_kwargs has {shorten(name)}, which the chat template does not read; "
                f"did you mean {shorten(near)}?",
                parameter="chat_template_kwargs",
            )
    return unread


class UnreadNotices:
    """Says once of each variable that a template does not read it."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def say(self, names: Iterable[str], template: str) -> None:
        """Log the new ones among the variables that the template does not read.

        raises: as `find_unread`
        """
        # Clients send such variables to every model, whatever its template reads.
        for name in find_unread(names, template):
            if name not in self.names and len(self.names) < MAX_NOTICES:
                self.names.add(name)
                LOG.warning(
                    log_event(
                        "chat_template_kwargs has a variable that the chat template does not read",
                        variable=shorten(name),
                    )
                )
