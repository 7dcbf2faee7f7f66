"""Load the selected plugins. This is the only importer of stevedore, narrowed in three ways.

stevedore lists entry points from a disk cache, which can be stale and forgets the distribution. It
logs load errors instead of raising them. It lets SystemExit and AssertionError of one plugin end
the whole program.
"""

from __future__ import annotations

import importlib
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from typing import Any

from stevedore.driver import DriverManager
from stevedore.extension import Extension

from headstock.errors import (
    CannotRun,
    HeadstockError,
    PluginBroken,
    SpiMismatch,
    describe_error,
    describe_type,
    shorten,
)
from headstock.registry.contract_checks import Contract, explain_mismatch, find_mismatch
from headstock.registry.entries import (
    InstalledPlugin,
    entry_point_group,
    find_plugin,
    kind_label,
    list_installed,
)
from headstock.spi import (
    SPI,
    AttentionSpec,
    CacheSpec,
    CheckpointSpec,
    CommandSpec,
    ExecutorSpec,
    GrammarSpec,
    LogitsSpec,
    ModelSpec,
    OpsSpec,
    PluginSpec,
    ProposerSpec,
    RunnerSpec,
    SchedulerSpec,
    ToolParserSpec,
)

SPEC_CLASSES: dict[str, type[PluginSpec] | type[CheckpointSpec]] = {
    "attention": AttentionSpec,
    "cache": CacheSpec,
    "scheduler": SchedulerSpec,
    "runner": RunnerSpec,
    "ops": OpsSpec,
    "model": ModelSpec,
    "checkpoint": CheckpointSpec,
    "command": CommandSpec,
    "proposer": ProposerSpec,
    "tools": ToolParserSpec,
    "logits": LogitsSpec,
    "grammar": GrammarSpec,
    "executor": ExecutorSpec,
}


class PluginDriver(DriverManager[Any]):
    """stevedore's driver of one plugin; every failure to load it is raised as PluginBroken."""

    def __init__(self, plugin: InstalledPlugin) -> None:
        self.plugin = plugin
        # invoke_on_load calls the entry point, which returns the spec
        super().__init__(entry_point_group(plugin.kind), plugin.name, invoke_on_load=True)

    def list_entry_points(self) -> list[EntryPoint]:
        """The entry point of this plugin alone; stevedore's cache is not read."""
        return [EntryPoint(name=self.plugin.name, value=self.plugin.target, group=self.namespace)]

    def _load_one_plugin(self, ep: EntryPoint, *arguments: Any) -> Extension[Any] | None:
        # Not BaseException: an interrupt is the user's and goes through.
        try:
            with keep_signal_handlers():
                return super()._load_one_plugin(ep, *arguments)
        except CannotRun as error:  # its light module already knows that it cannot serve here
            raise CannotRun(f"{self.plugin}: {shorten(error, 300)}") from error
        except (Exception, SystemExit) as error:
            raise PluginBroken(_explain_load_failure(self.plugin, error)) from error

    @property
    def spec(self) -> object:
        """The object that the entry point's function returned."""
        return self.extensions[0].obj


@contextmanager
def keep_signal_handlers() -> Iterator[None]:
    """Keep Ctrl-C and SIGTERM what they were: a plugin that is imported owns no process."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = [signal.getsignal(number) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            # None is a handler of C code, which Python cannot set. Only the main thread may set
            # one, so in others there is nothing to undo.
            if handler is not None and signal.getsignal(number) != handler:
                signal.signal(number, handler)


def _explain_load_failure(plugin: InstalledPlugin, error: BaseException) -> str:
    """Explain that a plugin raised while it was loaded."""
    return (
        f"{plugin} failed to load: {describe_error(error)}; repair it or remove it with: pip "
        f"uninstall {plugin.distribution}"
    )


def load_spec(
    kind: str,
    name: str,
    contract: Contract = SPI,
    installed: Sequence[InstalledPlugin] | None = None,
) -> Any:
    """Load the spec of a plugin and check it against the contract.

    Only the light module of the spec is imported, not the implementation.

    contract: the versions that this core offers
    installed: the plugins of `kind`, where they have been listed already

    raises: UnknownPlugin, AmbiguousPlugin, PluginBroken, SpiMismatch
    """
    plugin = find_plugin(kind, name, installed)
    try:
        spec = PluginDriver(plugin).spec
    except PluginBroken as error:
        # A plugin of another version may use names that this one lacks, and fail before its spec
        # can say its version.
        if mismatch := find_mismatch(plugin, contract):
            raise SpiMismatch(mismatch) from error
        raise
    _check_spec(plugin, spec, contract)
    return spec


def load_specs(kind: str) -> tuple[tuple[InstalledPlugin, Any], ...]:
    """Load every spec of `kind`; one that fails is replaced by the HeadstockError it raised."""
    # Listing reads the metadata of every distribution, so it is done once and not for each plugin.
    installed = list_installed(kind)
    return tuple((plugin, _load_spec_or_error(plugin, installed)) for plugin in installed)


def _load_spec_or_error(plugin: InstalledPlugin, installed: Sequence[InstalledPlugin]) -> Any:
    """Load a plugin's spec, or return the error that loading it raises."""
    try:
        return load_spec(plugin.kind, plugin.name, installed=installed)
    except HeadstockError as error:
        return error


def _check_spec(plugin: InstalledPlugin, spec: Any, contract: Contract) -> None:
    """Check what an entry point returned: its type, its name and its version of the contract.

    raises: PluginBroken, SpiMismatch
    """
    spec_class = SPEC_CLASSES[plugin.kind]
    if not isinstance(spec, spec_class):
        raise PluginBroken(
            f"{plugin}: expected a {spec_class.__name__} of headstock.spi, got "
            f"{describe_type(spec)}"
        )
    # The name in metadata selects the plugin; one that differs would show in messages and --opt.
    if spec.name != plugin.name:
        raise PluginBroken(
            f"{plugin}: expected the name {plugin.name!r} in its spec, got {shorten(spec.name)!r}"
        )
    if mismatch := explain_mismatch(plugin, spec.spi, contract):
        raise SpiMismatch(mismatch)
    if isinstance(spec, CommandSpec | ToolParserSpec) and spec.options is not None:
        raise PluginBroken(
            f"{plugin} declares options, but commands and tool parsers are not given any; its "
            "author should leave `options` out of its spec"
        )


def import_implementation(spec: PluginSpec) -> Any:
    """Import what the spec's `implementation` names.   raises: PluginBroken"""
    return import_object(spec, spec.implementation)


def make_part(
    spec: PluginSpec,
    base: type,
    *parts: Any,
    expected: tuple[type[Exception], ...] = (),
    **keywords: Any,
) -> Any:
    """Make a part with the spec's implementation.

    raises: PluginBroken when the part is no `base`, or for an exception that is neither a
        HeadstockError nor `expected`; CannotRun, which names the plugin then
    """
    make = import_implementation(spec)
    try:
        part = make(*parts, **keywords)
    except (Exception, SystemExit) as error:
        if isinstance(error, CannotRun):
            raise CannotRun(f"{plugin_label(spec)}: {shorten(error, 300)}") from error
        # `expected`: out of memory and the like are the machine's fault, and the caller's to
        # explain.
        if isinstance(error, (HeadstockError, *expected)):
            raise
        raise PluginBroken(
            f"{plugin_label(spec)}: it could not be made: {describe_error(error)}"
        ) from error
    if not isinstance(part, base):
        raise PluginBroken(
            f"{plugin_label(spec)}: {spec.implementation}: expected {base.__name__}, got "
            f"{shorten(part)}"
        )
    return part


def import_object(spec: PluginSpec, path: str) -> Any:
    """Import what a dotted path of the spec (`package.module:Name`) names.

    raises: PluginBroken
    """
    module, _, name = path.partition(":")
    try:
        with keep_signal_handlers():
            return getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:
        raise PluginBroken(
            f"{plugin_label(spec)}: {path} cannot be imported: {describe_error(error)}"
        ) from error


def plugin_label(spec: PluginSpec) -> str:
    """The plugin and its distribution, as error texts name them."""
    kind = next(kind for kind, spec_class in SPEC_CLASSES.items() if isinstance(spec, spec_class))
    package = spec.implementation.partition(":")[0].partition(".")[0]
    same_name = [plugin for plugin in list_installed(kind) if plugin.name == spec.name]
    # Several distributions may provide the name; the one whose package the implementation lies
    # in is the likely origin.
    same_package = [
        plugin
        for plugin in same_name
        if plugin.target.partition(":")[0].partition(".")[0] == package
    ]
    return " or ".join(map(str, same_package or same_name)) or f"{kind_label(kind)} {spec.name!r}"
