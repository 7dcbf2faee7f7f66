"""Which plugin an exception came from: the innermost frame inside a plugin's package."""

from __future__ import annotations

import traceback
from collections.abc import Collection, Sequence
from types import FrameType

from attrs import frozen

from headstock.errors import describe_place
from headstock.registry.entries import InstalledPlugin, list_installed
from headstock.spi import (
    AttentionBackend,
    CachePolicy,
    GrammarEngine,
    LogitsProcessor,
    Ops,
    Proposer,
    Runner,
    ToolParser,
)

CORE = "headstock"
"""The package whose frames are core's fault; it also contains core's own plugins."""
KINDS: Sequence[tuple[type, str]] = (
    (AttentionBackend, "attention"),
    (CachePolicy, "cache"),
    (GrammarEngine, "grammar"),
    (LogitsProcessor, "logits"),
    (Ops, "ops"),
    (Proposer, "proposer"),
    (Runner, "runner"),
    (ToolParser, "tools"),
)


@frozen
class Culprit:
    """The plugin behind an exception, as error texts name it, and where it raised."""

    plugin: str
    place: str


def find_culprit(error: BaseException, chosen: Collection[tuple[str, str]] = ()) -> Culprit | None:
    """Find the plugin whose code raised, or called what raised; None when no frame is a plugin's.

    chosen: kinds and names of the plugins in use, for packages that provide several
    """
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    # Late and not at the start: a list reads the metadata of every distribution.
    plugins = list_installed()
    for depth in range(len(frames) - 1, -1, -1):
        frame, line = frames[depth]
        package = _package_of(frame)
        mine: Sequence[InstalledPlugin] = [
            plugin for plugin in plugins if _package_of_target(plugin) == package
        ]
        if package == CORE or not mine:
            continue
        callers = [caller for caller, _ in frames[: depth + 1]]
        mine = _narrow_down(mine, callers, chosen)
        return Culprit(_label_plugins(mine), describe_place(frame, line))
    return None


def _label_plugins(plugins: Sequence[InstalledPlugin]) -> str:
    """The plugin, or the distribution where several of its plugins come into question."""
    first = plugins[0]
    return str(first) if len(plugins) == 1 else f"a plugin of {first.distribution} {first.version}"


def _package_of(frame: FrameType) -> str:
    """The top-level package of a frame's module; empty for code without a module."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _package_of_target(plugin: InstalledPlugin) -> str:
    """The top-level package that an entry point lies in."""
    return plugin.target.partition(":")[0].partition(".")[0]


def _narrow_down(
    plugins: Sequence[InstalledPlugin],
    frames: Sequence[FrameType],
    chosen: Collection[tuple[str, str]],
) -> Sequence[InstalledPlugin]:
    """Leave those of a package's plugins that are in use and of the kind whose method ran."""
    in_use = [plugin for plugin in plugins if (plugin.kind, plugin.name) in chosen] or plugins
    if len(in_use) == 1:
        return in_use
    for frame in reversed(frames):
        owner = frame.f_locals.get("self")
        kinds = [kind for part, kind in KINDS if isinstance(owner, part)]
        of_kind = [plugin for plugin in in_use if plugin.kind in kinds]
        if of_kind:
            return of_kind
    return in_use
