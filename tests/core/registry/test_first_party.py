"""What the hints say of this project's own plugins is what its members declare."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from source_tree import PLUGINS, ROOT

from headstock import registry
from headstock.errors import UnknownPlugin
from headstock.registry import Installed
from headstock.registry.first_party import FOLDERS
from headstock.spi import PluginSpec


def test_the_table_is_what_the_members_declare() -> None:
    declared = {}
    for member in PLUGINS:
        project = tomllib.loads((member / "pyproject.toml").read_text())["project"]
        groups = {group.removeprefix("headstock."): tuple(names) for group, names in project["entry-points"].items()}
        declared[str(member.relative_to(ROOT))] = (project["name"], groups)
    assert {folder: (name, dict(kinds)) for folder, (name, kinds) in FOLDERS.items()} == declared


def test_an_absent_plugin_of_ours_comes_with_its_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstock.registry.entries.entry_points", lambda: _Nothing())
    with pytest.raises(UnknownPlugin) as caught:
        registry.spec("attention", "spda")
    assert "did you mean 'sdpa'?" in str(caught.value)
    assert "installed: none" in str(caught.value)
    assert "pip install headstock-sdpa (in a checkout: pip install ./backends/sdpa)" in str(caught.value)


OURS = [each for each in registry.installed() if each.distribution.startswith("headstock")]


@pytest.mark.parametrize("plugin", OURS, ids=lambda each: f"{each.kind}:{each.name}")
def test_every_plugin_of_ours_can_be_chosen_or_says_what_to_install(plugin: Installed) -> None:
    spec = registry.spec(plugin.kind, plugin.name)
    assert spec.summary
    if isinstance(spec, PluginSpec):
        assert registry.implementation(spec) is not None
        assert (registry.options(spec) is None) == (spec.options is None)
        assert all(reason.hint for reason in registry.missing(spec))
    else:
        assert Path(spec.directory).is_absolute()


class _Nothing:
    def select(self, group: str) -> list[object]:
        return []
