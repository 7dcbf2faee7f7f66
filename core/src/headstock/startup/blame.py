"""Errors that name the plugin at fault, in one line."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from attrs import field, frozen

from headstock import registry
from headstock.config import EngineConfig
from headstock.errors import (
    PLUGIN_FAILURES,
    HeadstockError,
    PluginBroken,
    describe_error,
    describe_place,
)
from headstock.selection.attention_choice import list_backend_names
from headstock.selection.select import SelectedPlugins


@frozen
class PluginNames:
    """The plugins of an engine: kinds and names, and the name of its operations."""

    chosen: frozenset[tuple[str, str]] = field(factory=frozenset)
    ops: str = ""

    @classmethod
    def of(cls, parts: SelectedPlugins, architecture: str) -> PluginNames:
        """The names of the selected plugins and of the model's family."""
        pairs = {("attention", choice.spec.name) for choice in parts.attention}
        pairs |= {("model", architecture), ("scheduler", parts.scheduler.name)}
        pairs |= {("cache", parts.cache.name), ("runner", parts.runner.name)}
        pairs |= {("ops", parts.ops.name)}
        if parts.proposer is not None:
            pairs |= {("proposer", parts.proposer.spec.name)}
        if parts.grammar is not None:
            pairs |= {("grammar", parts.grammar.name)}
        pairs |= {("logits", each.spec.name) for each in parts.processors}
        return cls(frozenset(pairs), parts.ops.name)

    @classmethod
    def from_config(cls, config: EngineConfig) -> PluginNames:
        """The names in a configuration, before any plugin is selected."""
        pairs = {("attention", name) for name in list_backend_names(config.attn)}
        pairs |= {("cache", config.cache_type), ("scheduler", config.scheduler)}
        pairs |= {("runner", config.runner), ("ops", config.ops), ("proposer", config.proposer)}
        pairs |= {("grammar", config.grammar)}
        pairs |= {("logits", name) for name in config.logits_processors}
        return cls(frozenset(pairs))

    def name_of(self, error: BaseException) -> str:
        """The plugin whose code raised; empty when it is core's."""
        culprit = registry.find_culprit(error, self.chosen)
        return "" if culprit is None else culprit.plugin

    def describe(self, error: BaseException) -> str:
        """What was raised, where, and in whose code.

        An error of headstock's is in its own words, which name the plugin where it is one's.
        """
        if isinstance(error, HeadstockError):
            return str(error)
        culprit = registry.find_culprit(error, self.chosen)
        if culprit is None:
            *_, (frame, line) = traceback.walk_tb(error.__traceback__)
            return f"{describe_error(error)} in {describe_place(frame, line)}"
        return f"{culprit.plugin} raised {describe_error(error)} in {culprit.place}"


@contextmanager
def blame_plugins(names: PluginNames | None = None) -> Iterator[None]:
    """Turn what a plugin raises in this block into an error that names the plugin.

    raises: PluginBroken; what core itself raises stays as it is
    """
    try:
        yield
    except HeadstockError:
        raise
    except PLUGIN_FAILURES as error:
        names = names or PluginNames()
        if not names.name_of(error):
            raise
        raise PluginBroken(names.describe(error)) from error
