"""What every plugin declares before any of its own code runs."""

from __future__ import annotations

import re

from attrs import field, frozen
from attrs.validators import deep_iterable, instance_of, optional

from headstock.spi.versions import SpiRange

NAME = re.compile(r"[a-z][a-z0-9_-]*")
"""What a plugin may be called (a model is named by its architecture instead)."""


def check_path(instance: object, attribute: object, value: str) -> None:
    """Raise ValueError unless `value` reads `package.module:attribute`."""
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", value):
        raise ValueError(f"expected a dotted path like 'package.module:Name', got {value!r}")


@frozen(kw_only=True)
class Require:
    """A distribution that a plugin needs at run time.

    import_name: looked up without importing it
    version: a PEP 440 specifier; "" for any
    hint: the command that installs it
    any_of: alternatives, one of which is enough; the other fields then describe the need as a whole
    """

    import_name: str
    distribution: str
    version: str = ""
    hint: str = ""
    any_of: tuple[Require, ...] = ()


@frozen(kw_only=True)
class Rejection:
    """One reason why a plugin cannot serve here: a stable code, the cause and the next move."""

    code: str
    message: str
    hint: str = ""


@frozen(kw_only=True)
class PluginSpec:
    """The fields that all kinds of plugin share.

    Making one imports neither torch nor a kernel library.

    implementation: a path `package.module:Name`, imported only when the plugin is chosen
    options: the path of an attrs class, whose fields are the plugin's own options
        (`--opt name.field=value`); commands and tool parsers have none
    request_args: the path of an attrs class, whose fields are the keys that the plugin takes of a
        request's `extra_args`. Values are as JSON has them, and the class's validators have the
        last word.
    resolve: the path of `resolve(query, env)`, which is asked once the plugin is named and before
        weights load; None when it always says yes. The query is a `PartQuery`, but None for
        commands and tool parsers, and an `AttentionQuery` for a backend, whose answer may be
        narrower capabilities. Other kinds answer with None, or with each `Rejection` in a tuple
    """

    # Paths and not objects: plugins are listed, checked and refused without their code.
    name: str = field(validator=instance_of(str))
    spi: SpiRange = field(validator=instance_of(SpiRange))
    summary: str = field(validator=instance_of(str))
    implementation: str = field(validator=check_path)
    requires: tuple[Require, ...] = field(
        default=(), validator=deep_iterable(instance_of(Require), instance_of(tuple))
    )
    options: str | None = field(default=None, validator=optional(check_path))
    request_args: str | None = field(default=None, validator=optional(check_path))
    resolve: str | None = field(default=None, validator=optional(check_path))
