"""List installed plugins by the metadata of their distributions; no plugin code runs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType

from attrs import frozen

from headstock.distributions import (
    EntryPointLine,
    InstalledDistribution,
    normalize_name,
    read_distributions,
    read_path_times,
)
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
from headstock.spi.versions import RESERVED, SPI

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

_TARGET = re.compile(r"[A-Za-z_][\w.]*\s*:\s*[A-Za-z_][\w.]*\s*(\[.*\])?")
"""A module and what it calls its function; extras may follow."""


@frozen(kw_only=True)
class InstalledPlugin:
    """An entry point of a plugin.

    `status` is "ok", "duplicate" (several distributions provide the name), "bad name" or
    "bad target".
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


@frozen(kw_only=True)
class UnusableEntry:
    """An entry point that is not a plugin, or an unreadable file of entry points.

    kind: that its group names; empty where none is known
    status: "unreadable", "unknown kind" or "reserved kind"
    reason: what was found, what is wanted and the next move
    """

    kind: str
    name: str
    distribution: str
    version: str
    target: str
    status: str
    reason: str

    @property
    def provider(self) -> str:
        """The distribution and its version, as far as they are known."""
        return f"{self.distribution} {self.version}".strip() or "a distribution without a name"


def kind_label(kind: str) -> str:
    """The noun for a plugin of `kind` in error texts."""
    return _KIND_LABELS.get(kind, kind)


def entry_point_group(kind: str) -> str:
    """The entry-point group of `kind`.   raises: UsageError for a kind that does not exist"""
    if kind not in SPI:
        raise UsageError(
            f"kind of plugin: expected one of {', '.join(SPI)}, got {shorten(kind)!r}"
            f"{suggest_name(kind, SPI)}"
        )
    return f"headstock.{kind}"


def list_installed(kind: str | None = None) -> tuple[InstalledPlugin, ...]:
    """List the installed plugins of `kind` (None: all), by kind, name and distribution."""
    # Metadata alone, without an import: a broken plugin must not break a list of plugins, and
    # imports of kernel libraries take seconds.
    if kind is not None:
        entry_point_group(kind)
    listed = _read_entries(read_distributions, read_path_times())[0]
    return tuple(plugin for plugin in listed if kind in (None, plugin.kind))


def list_unusable(kind: str | None = None) -> tuple[UnusableEntry, ...]:
    """List entry points that are broken plugins, and unreadable files.

    Those of `kind` and those of unknown kinds may hide a plugin of it.
    """
    unusable = _read_entries(read_distributions, read_path_times())[1]
    return tuple(entry for entry in unusable if kind is None or entry.kind in (kind, ""))


# A start asks a dozen times, and a scan of 200 distributions takes 5 to 50 ms.
@lru_cache(maxsize=1)
def _read_entries(
    read: Callable[[], Iterable[InstalledDistribution]], path_times: tuple[tuple[str, int], ...]
) -> tuple[tuple[InstalledPlugin, ...], tuple[UnusableEntry, ...]]:
    """Read the plugins of all kinds from the metadata of distributions, and what is unusable.

    path_times: the folders that are searched and when each changed, as installing does
    """
    groups = {entry_point_group(kind): kind for kind in SPI}
    lines: dict[str, list[tuple[InstalledDistribution, EntryPointLine]]] = {}
    unusable = []
    for distribution in read():
        for line in distribution.read_entry_points():
            if line.fault or (line.group not in groups and _is_ours(line.group)):
                unusable.append(_make_unusable(distribution, line))
            elif line.group in groups:
                lines.setdefault(groups[line.group], []).append((distribution, line))
    plugins = (plugin for kind in SPI for plugin in _make_records(kind, lines.get(kind, ())))
    return tuple(plugins), tuple(unusable)


def _is_ours(group: str) -> bool:
    """Whether only a plugin of headstock would use the group."""
    return group.lower() == "headstock" or group.lower().startswith("headstock.")


def _make_unusable(distribution: InstalledDistribution, line: EntryPointLine) -> UnusableEntry:
    """Make the record of a line that is not a plugin."""
    kind = line.group.partition(".")[2] if _is_ours(line.group) else ""
    if line.fault:
        quoted = f": {shorten(line.name or line.value)!r}" if line.group or line.name else ""
        where = f" in [{shorten(line.group)}]" if line.group else ""
        status, reason = "unreadable", f"{line.fault}{where}{quoted}; {_remedy(distribution)}"
    elif kind in RESERVED:
        status = "reserved kind"
        reason = (
            f"expected the group headstock.{{{','.join(SPI)}}}, got {line.group}, reserved for "
            "later versions"
        )
    else:
        status = "unknown kind"
        reason = (
            f"expected the group headstock.{{{','.join(SPI)}}}, got {shorten(line.group)}"
            f"{suggest_name(kind, SPI, '')}"
        )
    return UnusableEntry(
        kind=kind,
        name=shorten(line.name),
        distribution=distribution.name,
        version=distribution.version,
        target=shorten(line.value),
        status=status,
        reason=reason,
    )


def _remedy(distribution: InstalledDistribution) -> str:
    """What makes a distribution with broken metadata harmless."""
    name = shorten(distribution.name)
    return f"repair it or remove it with: pip uninstall {name}" if name else "remove its folder"


def _make_records(
    kind: str, lines: Iterable[tuple[InstalledDistribution, EntryPointLine]]
) -> list[InstalledPlugin]:
    """Make the records of one group, sorted by name, distribution and target."""
    listed = list(lines)
    providers = Counter(line.name for _, line in listed)
    records = (
        InstalledPlugin(
            kind=kind,
            name=line.name,
            distribution=distribution.name,
            version=distribution.version,
            target=line.value,
            status="duplicate" if providers[line.name] > 1 else _check_line(kind, line),
        )
        for distribution, line in listed
    )
    return sorted(records, key=lambda record: (record.name, record.distribution, record.target))


def _check_line(kind: str, line: EntryPointLine) -> str:
    """The status of an entry point whose name is its own."""
    # A model is named by its architecture, as config.json spells it. No other name may be "auto",
    # which every setting of a plugin takes already.
    if kind != "model" and (not NAME.fullmatch(line.name) or line.name == "auto"):
        return "bad name"
    return "ok" if _TARGET.fullmatch(line.value) else "bad target"


def explain_unusable(plugin: InstalledPlugin) -> str:
    """Explain what is wrong with a name or a target; empty for other plugins."""
    match plugin.status:
        case "bad name":
            return (
                f"its name cannot be used: expected {NAME.pattern}, not 'auto', got "
                f"{shorten(plugin.name)!r}"
            )
        case "bad target":
            return f"its target: expected MODULE:FUNCTION, got {shorten(plugin.target)!r}"
    return ""


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
            if normalize_name(plugin.distribution) == normalize_name(distribution)
        ]
    if not matches:
        raise UnknownPlugin(_explain_unknown(kind, name, installed))
    if len(matches) > 1:
        raise AmbiguousPlugin(_explain_ambiguous(matches))
    if fault := explain_unusable(matches[0]):
        raise PluginBroken(f"{matches[0]}: {fault}")
    return matches[0]


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
        if distribution and normalize_name(plugin.distribution) == distribution
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


ANY_DECODER = "transformers"
"""The name of the family that is asked for architectures that no other serves."""


def list_served_names(architecture: str, *, has_inputs: bool = False) -> tuple[str, ...]:
    """The names under which a family may serve an architecture, its own first.

    transformers calls a model without its head after the family alone: Qwen3Model, Gemma3TextModel,
    and Gemma3Model for the one that takes images.
    has_inputs: whether the model takes other inputs beside text
    """
    bare = architecture.removesuffix("Model")
    if bare == architecture:
        return (architecture,)
    if has_inputs:
        return (architecture, f"{bare}ForConditionalGeneration")
    families = dict.fromkeys((bare, bare.removesuffix("Text")))
    return (architecture, *(f"{family}ForCausalLM" for family in families))


def unknown_architecture_error(
    name: str, *, has_code: bool = False, inputs: Sequence[str] = (), reason: str = ""
) -> CannotRun:
    """Make the error for an architecture that no installed model family serves.

    has_code: the checkpoint brings Python code for it
    inputs: what the model takes beside text, such as "images"
    reason: why the family of all decoders does not serve it either
    """
    lines = install_lines("model")
    names = list_served_names(name, has_inputs=bool(inputs))
    absent = next((lines[each] for each in names if each in lines), None)
    if absent:
        return CannotRun(f"the model family of {name} is not installed; install it with: {absent}")
    # Counted, not listed: those of a full installation would not fit into a line.
    names_served = {plugin.name for plugin in list_installed("model")} - {ANY_DECODER}
    served = format_count(len(names_served), "architecture")
    code = "; the checkpoint's own Python code is never run" if has_code else ""
    if inputs:
        return CannotRun(
            f"the architecture {shorten(name)} takes {' and '.join(inputs)}, which headstock does "
            f"not serve{code}; choose a model of text alone: 'headstock plugins list model' shows "
            f"the {served} served"
        )
    also = f", nor does transformers: {shorten(reason, 160)}" if reason else ""
    return CannotRun(
        f"no installed model family serves the architecture {shorten(name)}{also}{code}; "
        f"'headstock plugins list model' shows the {served} served; docs/plugins.md says how to "
        "add a family"
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
        choices = [
            (f"model_family (--model-family) {choice.partition(':')[0]}") for choice in choices
        ]
    return (
        f"{kind} {name!r} is provided by {len(choices)} distributions: {providers}; choose with "
        f"{' or '.join(choices)}"
    )
