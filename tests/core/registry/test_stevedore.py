"""What is overridden in stevedore exists there, is really called, and keeps its cache out."""

from __future__ import annotations

import inspect
import sys
from importlib.metadata import EntryPoint, PackageNotFoundError, version
from pathlib import Path

import pytest
from stevedore import _cache
from stevedore.driver import DriverManager
from stevedore.extension import Extension, ExtensionManager
from stevedore.named import NamedExtensionManager

from headstock import registry
from headstock.registry.loading import PluginDriver


def test_the_private_methods_are_there_with_the_same_arguments() -> None:
    assert list(inspect.signature(ExtensionManager.list_entry_points).parameters) == ["self"]
    for manager in (ExtensionManager, NamedExtensionManager):
        parameters = list(inspect.signature(manager._load_one_plugin).parameters)
        assert parameters == ["self", "ep", "invoke_on_load", "invoke_args", "invoke_kwds"]
    assert "list_entry_points" in vars(PluginDriver)
    assert "_load_one_plugin" in vars(PluginDriver)
    assert issubclass(PluginDriver, DriverManager)


def test_the_overrides_are_called_and_the_cache_is_not(
    broken: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[str] = []
    loaded: list[str] = []
    list_entry_points, load_one_plugin = (
        PluginDriver.list_entry_points,
        PluginDriver._load_one_plugin,
    )

    def listing(self: PluginDriver) -> list[EntryPoint]:
        listed.append(self.namespace)
        return list_entry_points(self)

    def loading(self: PluginDriver, ep: EntryPoint, *arguments: object) -> Extension[object] | None:
        loaded.append(ep.name)
        return load_one_plugin(self, ep, *arguments)

    def cached(*_: object, **__: object) -> None:
        raise RuntimeError("the cache was asked")

    monkeypatch.setattr(PluginDriver, "list_entry_points", listing)
    monkeypatch.setattr(PluginDriver, "_load_one_plugin", loading)
    for name in ("get_group_all", "get_group_named", "get_single"):
        monkeypatch.setattr(_cache, name, cached)
    registry.load_spec("scheduler", "sound")
    assert (listed, loaded) == (["headstock.scheduler"], ["sound"])


def test_a_plugin_that_is_removed_is_gone_at_once(broken: Path) -> None:
    registry.load_spec("scheduler", "sound")
    (broken / "sound_plugin-1.0.dist-info" / "entry_points.txt").unlink()
    (broken / "sound_plugin-1.0.dist-info" / "METADATA").unlink()
    (broken / "sound_plugin-1.0.dist-info").rmdir()
    with pytest.raises(PackageNotFoundError):
        version("sound-plugin")
    assert "sound" not in {plugin.name for plugin in registry.list_installed("scheduler")}


def test_a_plugin_that_is_installed_later_is_there_at_once(broken: Path) -> None:
    before = registry.list_installed("scheduler")
    info = broken / "arrived-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: arrived\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[headstock.scheduler]\narrived = sound_plugin:spec\n")

    added = set(registry.list_installed("scheduler")) - set(before)
    assert [(plugin.name, plugin.distribution) for plugin in added] == [("arrived", "arrived")]


def test_an_interrupt_is_not_swallowed(broken: Path) -> None:
    (broken / "sound_plugin.py").write_text("raise KeyboardInterrupt\n")
    sys.modules.pop("sound_plugin", None)
    with pytest.raises(KeyboardInterrupt):
        registry.load_spec("scheduler", "sound")
