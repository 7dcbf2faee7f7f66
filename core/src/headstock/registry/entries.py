"""List installed plugins by the metadata of their distributions; no plugin code runs."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from importlib.metadata import (
    Distribution,
    EntryPoint,
    EntryPoints,
    PackageMetadata,
    entry_points,
)
from types import MappingProxyType

from attrs import frozen

from headstock.errors import (
    MAX_ERROR_LENGTH,
    AmbiguousPlugin,
    CannotRun,
    PluginBroken,
    UnknownPlugin,
    UsageError,
    format_count,
    join_names,
    shorten,
    suggest_name,
)
from headstock.registry.first_party import find_distribution, install_lines
from headstock.spi.plugin import NAME
from headstock.spi.versions import SPI

_KIND_LABELS: Mapping[str, str] = MappingProxyType(
    {
        "attention": "attention backend",
        "cache": "cache policy",
        "ops": "set of operations",
        "model": "model family",
        "tools": "tool parser",
        "logits": "logits processor",
    }
)


@frozen(kw_only=True)
class InstalledPlugin:
    """An entry point of a plugin.

    `status` is "ok", "duplicate" (several distributions provide the name) or "bad name".
    """

    kind: str
    name: str
    distribution: str
    version: str
    target: str
    status: str

    def __str__(self) -> str:
        provider = f"{self.distribution} {self.version}, {self.target}"
        return f"{kind_label(self.kind)} {self.name!r} ({provider})"


def kind_label(kind: str) -> str:
    """The noun for a plugin of `kind` in error texts."""
    return _KIND_LABELS.get(kind, kind)


def entry_point_group(kind: str) -> str:
    """The entry-point group of `kind`.   raises: UsageError for a kind that does not exist"""
    if kind not in SPI:
        raise UsageError(
            f"no kind of plugin is called {shorten(kind)!r}; wanted one of "
            f"{', '.join(SPI)}{suggest_name(kind, SPI)}"
        )
    return f"headstock.{kind}"


def list_installed(kind: str | None = None) -> tuple[InstalledPlugin, ...]:
    """List the installed plugins of `kind` (None: all), by kind, name and distribution."""
    # Metadata alone, without an import: a broken plugin must not break a list of plugins, and
    # imports of kernel libraries take seconds.
    if kind is not None:
        entry_point_group(kind)
    listed = _read_plugins(entry_points, _read_path_times())
    return tuple(plugin for plugin in listed if kind in (None, plugin.kind))


# A start asks a dozen times, and a scan of 200 distributions takes 5 to 50 ms.
@lru_cache(maxsize=1)
def _read_plugins(
    read: Callable[[], EntryPoints], path_times: tuple[tuple[str, int], ...]
) -> tuple[InstalledPlugin, ...]:
    """Read the plugins of all kinds from the metadata of distributions.

    path_times: the folders that are searched and when each changed, as installing does
    """
    everything = read()

    # Every access to `metadata` parses the whole file, and a distribution has several plugins.
    @cache
    def read_metadata(provider: Distribution) -> PackageMetadata:
        """The metadata of a distribution."""
        return provider.metadata

    return tuple(
        plugin
        for kind in SPI
        for plugin in _make_records(
            kind, everything.select(group=entry_point_group(kind)), read_metadata
        )
    )


def _read_path_times() -> tuple[tuple[str, int], ...]:
    """The folders of `sys.path` that exist, and when each last changed, in nanoseconds."""
    times = []
    for folder in sys.path:
        with suppress(OSError):
            times.append((folder, os.stat(folder or ".").st_mtime_ns))
    return tuple(times)


def _make_records(
    kind: str,
    entries: Iterable[EntryPoint],
    read_metadata: Callable[[Distribution], PackageMetadata],
) -> list[InstalledPlugin]:
    """Make the records of one group, sorted by name, distribution and target."""
    listed = list(entries)
    providers = Counter(entry.name for entry in listed)
    records = (
        _make_record(
            kind, entry, providers[entry.name], read_metadata(entry.dist) if entry.dist else None
        )
        for entry in listed
    )
    return sorted(records, key=lambda record: (record.name, record.distribution, record.target))


def _make_record(
    kind: str, entry: EntryPoint, providers: int, metadata: PackageMetadata | None
) -> InstalledPlugin:
    """Make the record of one entry point from the metadata of its distribution."""
    # A model is named by its architecture, as config.json spells it. No other name may be "auto",
    # which every setting of a plugin takes already.
    is_usable = kind == "model" or (NAME.fullmatch(entry.name) and entry.name != "auto")
    return InstalledPlugin(
        kind=kind,
        name=entry.name,
        distribution=metadata["Name"] if metadata else "",
        version=metadata["Version"] if metadata else "",
        target=entry.value,
        status="duplicate" if providers > 1 else "ok" if is_usable else "bad name",
    )


def find_plugin(
    kind: str, name: str, installed: Sequence[InstalledPlugin] | None = None
) -> InstalledPlugin:
    """Find the one plugin that `name` stands for; `DISTRIBUTION:NAME` picks among several.

    installed: the plugins of `kind`, where they have been listed already

    raises: UnknownPlugin, AmbiguousPlugin, PluginBroken (a name that cannot be used)
    """
    distribution, _, plugin_name = name.rpartition(":")
    if installed is None:
        installed = list_installed(kind)
    matches = [plugin for plugin in installed if plugin.name == plugin_name]
    # PEP 503: "headstock_flash_attn" and "headstock-flash-attn" are one distribution.
    if distribution:
        matches = [
            plugin
            for plugin in matches
            if _normalize_name(plugin.distribution) == _normalize_name(distribution)
        ]
    if not matches:
        raise UnknownPlugin(_explain_unknown(kind, name, installed))
    if len(matches) > 1:
        raise AmbiguousPlugin(_explain_ambiguous(matches))
    if matches[0].status == "bad name":
        raise PluginBroken(
            f"{matches[0]} has a name that cannot be used: wanted {NAME.pattern}, and not 'auto'"
        )
    return matches[0]


def _normalize_name(distribution: str) -> str:
    """Normalize a distribution's name as package indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _explain_unknown(kind: str, name: str, installed: Iterable[InstalledPlugin]) -> str:
    """Explain that no plugin has the name: what is installed, what could be, and what is near."""
    present = {
        plugin.name: f"{plugin.name} ({plugin.distribution} {plugin.version})"
        for plugin in installed
    }
    absent = {other: line for other, line in install_lines(kind).items() if other not in present}
    near = "" if name in absent else suggest_name(name, (*present, *absent))

    def list_values(names: Mapping[str, str]) -> list[str]:
        # Not all may have room: what was likely meant goes first.
        return [names[other] for other in sorted(names, key=lambda key: f" {key}?" not in near)]

    installed_text = join_names(list_values(present), 180) or "none"
    if name in absent:
        return (
            f"{kind_label(kind)} {name!r} is not installed; install it with: {absent[name]}; "
            f"installed: {installed_text}"
        )
    text = f"no {kind_label(kind)} {shorten(name)!r} is installed; installed: {installed_text}"
    room = MAX_ERROR_LENGTH - len(text) - len(near) - len("; 99 more")
    lines = {other: f"; not installed: {other}: {line}" for other, line in absent.items()}
    return text + join_names(list_values(lines), room, "") + near


def unknown_name_error(name: str) -> UnknownPlugin:
    """Make the error for a name that no plugin of any kind has."""
    plugin_name = name.rpartition(":")[2]
    absent = [
        line for kind in SPI for other, line in install_lines(kind).items() if other == plugin_name
    ]
    distribution, line = find_distribution(plugin_name)
    present = [
        plugin.name
        for plugin in list_installed()
        if distribution and _normalize_name(plugin.distribution) == distribution
    ]
    if present:
        return UnknownPlugin(
            f"no plugin is called {shorten(name)!r}; {distribution} has {', '.join(present)}"
        )
    absent += [line] if line else []
    if absent:
        return UnknownPlugin(
            f"no plugin {shorten(name)!r} is installed; install it with: {absent[0]}"
        )
    hint = suggest_name(plugin_name, {plugin.name for plugin in list_installed()})
    return UnknownPlugin(
        f"no plugin {shorten(name)!r} is installed; 'headstock plugins list' shows those that "
        f"are{hint}"
    )


def unknown_architecture_error(
    name: str, *, has_code: bool = False, inputs: Sequence[str] = ()
) -> CannotRun:
    """Make the error for an architecture that no installed model family serves.

    has_code: the checkpoint brings Python code for it
    inputs: what the model takes beside text, such as "images"
    """
    absent = install_lines("model").get(name)
    if absent:
        return CannotRun(f"the model family of {name} is not installed; install it with: {absent}")
    # Counted, not listed: those of a full installation would not fit into a line.
    served = format_count(len({plugin.name for plugin in list_installed("model")}), "architecture")
    code = "; the checkpoint's own Python code is never run" if has_code else ""
    if inputs:
        return CannotRun(
            f"the architecture {shorten(name)} takes {' and '.join(inputs)}, which headstock does "
            f"not serve{code}; choose a model of text alone: 'headstock plugins list model' shows "
            f"the {served} served"
        )
    return CannotRun(
        f"no installed model family serves the architecture {shorten(name)}{code}; 'headstock "
        f"plugins list model' shows the {served} served; docs/plugins.md says how to add a family"
    )


def _explain_ambiguous(plugins: list[InstalledPlugin]) -> str:
    """Explain that several distributions provide one name, or one provides it twice."""
    providers = ", ".join(f"{plugin.distribution} {plugin.version}" for plugin in plugins)
    choices = sorted({f"{plugin.distribution}:{plugin.name}" for plugin in plugins})
    kind, name = kind_label(plugins[0].kind), plugins[0].name
    if len(choices) == 1:
        return (
            f"{kind} {name!r} is provided twice by {plugins[0].distribution}; repair or uninstall "
            "it"
        )
    # A family is named by config.json, so that a flag names its distribution alone.
    if plugins[0].kind == "model":
        choices = [f"--model-family {choice.partition(':')[0]}" for choice in choices]
    return (
        f"{kind} {name!r} is provided by {len(choices)} distributions: {providers}; choose with "
        f"{' or '.join(choices)}"
    )
