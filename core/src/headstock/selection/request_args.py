"""What requests may give plugins: the keys of `extra_args` that the chosen ones claim."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from attrs import frozen

from headstock import registry
from headstock.errors import PluginBroken, RequestError, UsageError, shorten, suggest_name
from headstock.spi import LogitsSpec, PluginSpec


@frozen(eq=False)
class RequestArgs:
    """The keys of `extra_args` and whose they are.

    owners: by key, the name of the plugin that claims it
    makers: by name of a plugin, the class that it names as `request_args`
    """

    owners: Mapping[str, str]
    makers: Mapping[str, type[Any]]

    def make(self, extra_args: Mapping[str, Any] | None) -> dict[str, Any]:
        """Make an instance for each plugin that the request gives something, by its name.

        raises: RequestError for a key that no plugin claims, and for values that its class refuses
        """
        values: dict[str, dict[str, Any]] = {}
        for key, value in (extra_args or {}).items():
            if key not in self.owners:
                raise RequestError(
                    f"extra_args: no chosen plugin takes {shorten(key)!r}; "
                    f"{self._describe()}{suggest_name(key, self.owners)}",
                    "extra_args",
                )
            values.setdefault(self.owners[key], {})[key] = value
        return {name: self._make_one(name, arguments) for name, arguments in values.items()}

    def _make_one(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Make the instance of one plugin.   raises: RequestError"""
        try:
            return self.makers[name](**arguments)
        except (TypeError, ValueError) as error:
            raise RequestError(
                f"extra_args: {name!r} does not take {shorten(dict(arguments))}: "
                f"{shorten(error, 400)}",
                "extra_args",
            ) from error
        # A request must not end the engine, whatever a class does with what a caller gives.
        except (Exception, SystemExit) as error:
            raise RequestError(
                f"extra_args: {name!r} raised {type(error).__name__} for "
                f"{shorten(dict(arguments))}; "
                "report it to its author or leave the keys out",
                "extra_args",
            ) from error

    def _describe(self) -> str:
        """The keys that there are, for errors."""
        if not self.owners:
            return "none of them takes any"
        return "taken: " + ", ".join(f"{key} (by {name})" for key, name in self.owners.items())


def collect_request_args(specs: Sequence[PluginSpec]) -> RequestArgs:
    """Collect what the chosen plugins claim.

    raises: UsageError for a key that two of them claim, PluginBroken for a class that is not usable
    """
    owners: dict[str, str] = {}
    makers: dict[str, type[Any]] = {}
    for spec in specs:
        if spec.request_args is None:
            continue
        if not isinstance(spec, LogitsSpec):
            raise PluginBroken(
                f"{registry.plugin_label(spec)}: it declares request_args, but only logits "
                "processors are given any; its author should leave them out of its spec"
            )
        args_class = registry.import_object(spec, spec.request_args)
        if not attrs.has(args_class):
            raise PluginBroken(
                f"{registry.plugin_label(spec)}: its class of request_args {spec.request_args} is "
                "not an attrs class"
            )
        if spec.name in makers:
            raise UsageError(
                f"two chosen plugins are called {spec.name!r} and take extra_args; choose another "
                "instead of one"
            )
        makers[spec.name] = args_class
        for field in attrs.fields(args_class):
            if field.alias in owners:
                raise UsageError(
                    f"{owners[field.alias]!r} and {spec.name!r} both take {field.alias!r} of "
                    "extra_args; choose another instead of one"
                )
            if field.init:
                owners[field.alias] = spec.name
    return RequestArgs(owners, makers)
