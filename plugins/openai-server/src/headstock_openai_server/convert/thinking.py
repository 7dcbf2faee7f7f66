"""How a request turns thinking on or off: by variables of the chat template."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from headstock_openai_server.api.errors import refuse
from headstock_openai_server.api.ignored import IgnoredFields

SWITCHES = ("enable_thinking", "thinking")
"""The variables that turn thinking on or off: of most templates, of DeepSeek's."""
BUDGET = "thinking_budget"
"""The variable that tells the model how many tokens of thinking it may write."""


def switch_thinking(
    read: Collection[str], field: str, ignored: IgnoredFields, *, thinks: bool
) -> dict[str, Any]:
    """The variables that turn thinking on or off for a template that reads `read`.

    field: what the client calls the switch; `ignored` gets it if the template has none
    raises: ApiError
    """
    return _choose(dict.fromkeys(SWITCHES, thinks), read, field, ignored)


def limit_thinking(
    read: Collection[str], field: str, ignored: IgnoredFields, num_tokens: int
) -> dict[str, Any]:
    """The variable that limits thinking, for a template that reads `read`; the rest is as in
    `switch_thinking`.
    """
    return _choose({BUDGET: num_tokens}, read, field, ignored)


def _choose(
    variables: dict[str, Any], read: Collection[str], field: str, ignored: IgnoredFields
) -> dict[str, Any]:
    chosen = {name: value for name, value in variables.items() if name in read}
    if not chosen:
        if ignored.refuses:
            raise refuse(
                f"{field} is not supported: the chat template does not read it; leave it out",
                field,
                "unsupported",
            )
        ignored.add(field)
    return chosen
