"""Loading of chosen plugins. The only importer of stevedore, whose ways are narrowed here.

stevedore would list entry points from a disk cache that can be stale and forgets who provides them,
log load errors instead of raising them, and let SystemExit and AssertionError of one plugin end the
whole program.
"""

from __future__ import annotations

import importlib
from importlib.metadata import EntryPoint
from typing import Any

from stevedore.driver import DriverManager
from stevedore.extension import Extension

from headstock.errors import HeadstockError, PluginBroken, SpiMismatch, describe_error, shorten
from headstock.registry.entries import Installed, find, group, installed, noun
from headstock.registry.first_party import upgrade_line
from headstock.spi import (
    SPI,
    AttentionSpec,
    CacheSpec,
    CheckpointSpec,
    CommandSpec,
    ExecutorSpec,
    ModelSpec,
    OpsSpec,
    PluginSpec,
    RunnerSpec,
    SchedulerSpec,
)

SPECS: dict[str, type[PluginSpec] | type[CheckpointSpec]] = {
    "attention": AttentionSpec,
    "cache": CacheSpec,
    "scheduler": SchedulerSpec,
    "runner": RunnerSpec,
    "ops": OpsSpec,
    "model": ModelSpec,
    "checkpoint": CheckpointSpec,
    "executor": ExecutorSpec,
    "command": CommandSpec,
}


class Driver(DriverManager[Any]):
    """stevedore's driver of one plugin that was just found: every failure to load it is raised as
    PluginBroken.
    """

    def __init__(self, chosen: Installed) -> None:
        self.chosen = chosen
        super().__init__(group(chosen.kind), chosen.name, invoke_on_load=True)

    def list_entry_points(self) -> list[EntryPoint]:
        """The chosen entry point alone; stevedore's cache is not asked."""
        return [EntryPoint(name=self.chosen.name, value=self.chosen.target, group=self.namespace)]

    def _load_one_plugin(self, ep: EntryPoint, *arguments: Any) -> Extension[Any] | None:
        try:
            return super()._load_one_plugin(ep, *arguments)
        except (Exception, SystemExit) as error:
            raise PluginBroken(failure(self.chosen, error)) from error

    @property
    def spec(self) -> object:
        """What the entry point's function returned."""
        return self.extensions[0].obj


def failure(plugin: Installed, error: BaseException) -> str:
    """What is said of a plugin that raised while it was loaded."""
    return (
        f"{plugin} failed to load: {describe_error(error)}; repair it or remove it with: pip "
        f"uninstall {plugin.distribution}"
    )


def spec(kind: str, name: str) -> Any:
    """The spec of the plugin that `name` stands for, checked against the contract; only its light
    module is imported.

    raises: UnknownPlugin, AmbiguousPlugin, PluginBroken, SpiMismatch
    """
    chosen = find(kind, name)
    found = Driver(chosen).spec
    check(chosen, found)
    return found


def specs(kind: str) -> tuple[tuple[Installed, Any], ...]:
    """Every installed plugin of `kind` with its spec, or with the HeadstockError that choosing it
    would raise.
    """
    return tuple((each, spec_or_error(each)) for each in installed(kind))


def spec_or_error(plugin: Installed) -> Any:
    """The plugin's spec, or the error that choosing it would raise."""
    try:
        return spec(plugin.kind, plugin.name)
    except HeadstockError as error:
        return error


def check(plugin: Installed, found: Any) -> None:
    """Raise PluginBroken or SpiMismatch unless `found` is what an entry point of this kind and name
    must return.
    """
    wanted = SPECS[plugin.kind]
    if not isinstance(found, wanted):
        raise PluginBroken(
            f"{plugin} returned a {type(found).__name__}; wanted {wanted.__name__} from "
            "headstock.spi"
        )
    if found.name != plugin.name:
        raise PluginBroken(
            f"{plugin} calls itself {shorten(found.name)!r} in its spec; the two names must be the "
            "same"
        )
    offered = SPI[plugin.kind]
    if not found.spi.accepts(offered):
        newer = (found.spi.major, found.spi.minor) > offered
        side = "headstock" if newer else plugin.distribution
        raise SpiMismatch(
            f"{plugin} needs version {found.spi} of the {plugin.kind} contract; this headstock "
            f"offers {offered[0]}.{offered[1]}; upgrade {side}: {upgrade_line(side)}"
        )


def implementation(spec: PluginSpec) -> Any:
    """What the spec's `implementation` names, imported now.   raises: PluginBroken"""
    return imported(spec, spec.implementation)


def made(
    spec: PluginSpec,
    base: type,
    *parts: Any,
    expected: tuple[type[Exception], ...] = (),
    **named: Any,
) -> Any:
    """What the spec's implementation makes of the parts.

    raises: PluginBroken when that is no `base`, or for an exception that is neither a
        HeadstockError nor `expected`
    """
    make = implementation(spec)
    try:
        found = make(*parts, **named)
    except (Exception, SystemExit) as error:
        if isinstance(error, (HeadstockError, *expected)):
            raise
        raise PluginBroken(
            f"{origin(spec)}: it could not be made: {describe_error(error)}"
        ) from error
    if not isinstance(found, base):
        raise PluginBroken(
            f"{origin(spec)}: {spec.implementation} made {shorten(found)}, which is no "
            f"{base.__name__}"
        )
    return found


def imported(spec: PluginSpec, path: str) -> Any:
    """What a dotted path of the spec (`package.module:Name`) names, imported now.

    raises: PluginBroken
    """
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:
        raise PluginBroken(
            f"{origin(spec)}: {path} cannot be imported: {describe_error(error)}"
        ) from error


def origin(spec: PluginSpec) -> str:
    """The plugin and its distribution as error texts name them."""
    kind = next(kind for kind, wanted in SPECS.items() if isinstance(spec, wanted))
    package = spec.implementation.partition(":")[0].partition(".")[0]
    named = [each for each in installed(kind) if each.name == spec.name]
    same_package = [
        each for each in named if each.target.partition(":")[0].partition(".")[0] == package
    ]
    return " or ".join(map(str, same_package or named)) or f"{noun(kind)} {spec.name!r}"
