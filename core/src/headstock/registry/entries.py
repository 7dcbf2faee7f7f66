"""Which plugins are installed, by the metadata of their distributions alone: no plugin code
runs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType

from attrs import frozen

from headstock.errors import (
    AmbiguousPlugin,
    CannotRun,
    PluginBroken,
    UnknownPlugin,
    UsageError,
    find_nearest_name,
    shorten,
)
from headstock.registry.first_party import find_distribution, sources
from headstock.spi.plugin import NAME
from headstock.spi.versions import SPI

NOUNS: Mapping[str, str] = MappingProxyType(
    {
        "attention": "attention backend",
        "cache": "cache policy",
        "ops": "set of operations",
        "model": "model family",
    }
)


@frozen(kw_only=True)
class Installed:
    """One entry point. `status` is "ok", "duplicate" (several distributions provide the name) or
    "bad name".
    """

    kind: str
    name: str
    distribution: str
    version: str
    target: str
    status: str

    def __str__(self) -> str:
        return (
            f"{noun(self.kind)} {self.name!r} ({self.distribution} {self.version}, {self.target})"
        )


def noun(kind: str) -> str:
    """What error texts call a plugin of `kind`."""
    return NOUNS.get(kind, kind)


def group(kind: str) -> str:
    """The entry-point group of `kind`.   raises: UsageError for a kind that does not exist"""
    if kind not in SPI:
        raise UsageError(
            f"no kind of plugin is called {shorten(kind)!r}{suggestion(kind, SPI)}; wanted one of "
            f"{', '.join(SPI)}"
        )
    return f"headstock.{kind}"


def installed(kind: str | None = None) -> tuple[Installed, ...]:
    """The installed plugins of `kind` (None: of every kind), by kind, name and distribution."""
    groups = {each: group(each) for each in (tuple(SPI) if kind is None else (kind,))}
    # one scan of all distributions; asking group by group would scan as often
    everything = entry_points()
    return tuple(
        plugin
        for each, name in groups.items()
        for plugin in records(each, everything.select(group=name))
    )


def records(kind: str, entries: Iterable[EntryPoint]) -> list[Installed]:
    """The entry points of one group as records, by name, providing distribution and target."""
    found = list(entries)
    providers = Counter(entry.name for entry in found)
    named = (record(kind, entry, providers[entry.name]) for entry in found)
    return sorted(named, key=lambda each: (each.name, each.distribution, each.target))


def record(kind: str, entry: EntryPoint, providers: int) -> Installed:
    """What the metadata says of one entry point."""
    # once: each look parses the whole file
    metadata = entry.dist.metadata if entry.dist is not None else None
    named_well = kind == "model" or (NAME.fullmatch(entry.name) and entry.name != "auto")
    return Installed(
        kind=kind,
        name=entry.name,
        distribution=metadata["Name"] if metadata else "",
        version=metadata["Version"] if metadata else "",
        target=entry.value,
        status="duplicate" if providers > 1 else "ok" if named_well else "bad name",
    )


def find(kind: str, name: str) -> Installed:
    """The one plugin that `name` stands for; `DISTRIBUTION:NAME` picks among several.

    raises: UnknownPlugin, AmbiguousPlugin, PluginBroken (a name that nobody could ask for)
    """
    distribution, _, plain = name.rpartition(":")
    available = installed(kind)
    found = [each for each in available if each.name == plain]
    if distribution:
        found = [each for each in found if normal(each.distribution) == normal(distribution)]
    if not found:
        raise UnknownPlugin(unknown(kind, name, available))
    if len(found) > 1:
        raise AmbiguousPlugin(ambiguous(found))
    if found[0].status == "bad name":
        raise PluginBroken(
            f"{found[0]} has a name that cannot be used: wanted {NAME.pattern}, and not 'auto'"
        )
    return found[0]


def normal(distribution: str) -> str:
    """A distribution's name as package indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def unknown(kind: str, name: str, available: Iterable[Installed]) -> str:
    """What is said when no plugin has the name: what is near, what is installed, what could be."""
    present = {each.name: f"{each.name} ({each.distribution} {each.version})" for each in available}
    absent = {each: line for each, line in sources(kind).items() if each not in present}
    if name in absent:
        there = ", ".join(present.values()) or "none"
        return (
            f"{noun(kind)} {name!r} is not installed; install it with: {absent[name]}; "
            f"installed: {there}"
        )
    said = [
        f"no {noun(kind)} {shorten(name)!r} is installed{suggestion(name, (*present, *absent))}",
        f"installed: {', '.join(present.values()) or 'none'}",
        *(f"not installed: {each}: {line}" for each, line in absent.items()),
    ]
    return "; ".join(said)


def unknown_name(name: str) -> UnknownPlugin:
    """The error for a name that no plugin of any kind has."""
    plain = name.rpartition(":")[2]
    absent = [line for kind in SPI for each, line in sources(kind).items() if each == plain]
    distribution, line = find_distribution(plain)
    present = [
        each.name
        for each in installed()
        if distribution and normal(each.distribution) == distribution
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
    near = suggestion(plain, {each.name for each in installed()})
    return UnknownPlugin(
        f"no plugin {shorten(name)!r} is installed{near}; 'headstock plugins list' shows what is"
    )


def unknown_architecture(name: str) -> CannotRun:
    """The error for an architecture that no installed model family serves."""
    absent = sources("model").get(name)
    if absent:
        return CannotRun(f"the model family of {name} is not installed; install it with: {absent}")
    families: dict[str, list[str]] = {}
    for each in installed("model"):
        families.setdefault(each.distribution, []).append(each.name)
    served = "; ".join(
        f"{', '.join(names)} ({distribution})" for distribution, names in families.items()
    )
    return CannotRun(
        f"no installed model family serves the architecture {shorten(name)}; served: "
        f"{served or 'none'}; docs/plugins.md says how to add a family"
    )


def ambiguous(found: list[Installed]) -> str:
    """What is said when several distributions provide one name, or one distribution provides it
    twice.
    """
    who = ", ".join(f"{each.distribution} {each.version}" for each in found)
    choices = sorted({f"{each.distribution}:{each.name}" for each in found})
    kind, name = noun(found[0].kind), found[0].name
    if len(choices) == 1:
        return (
            f"{kind} {name!r} is provided twice by {found[0].distribution}; repair or uninstall it"
        )
    return (
        f"{kind} {name!r} is provided by {len(choices)} distributions: {who}; choose with "
        f"{' or '.join(choices)}"
    )


def suggestion(name: str, candidates: Iterable[str]) -> str:
    """` (did you mean 'x'?)` for the candidate most like `name`, or nothing."""
    near = find_nearest_name(name, candidates)
    return f" (did you mean {near!r}?)" if near is not None else ""
