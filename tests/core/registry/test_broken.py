"""Plugins that are broken each in one way, chosen through the registry."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from broken_plugins import DISTS, Dist, scheduler_module, write_installed

from headstock import registry
from headstock.errors import (
    AmbiguousPlugin,
    CannotRun,
    HeadstockError,
    PluginBroken,
    SpiMismatch,
    UnknownPlugin,
)
from headstock.spi import SPI
from headstock.spi.versions import format_version

OFFERED = f"offers {format_version(SPI['scheduler'])};"
EXPECTED = [
    (
        "import-error",
        PluginBroken,
        ["raises-import-error 1.0", "ModuleNotFoundError", "no_such_module_anywhere"],
    ),
    ("assertion", PluginBroken, ["raises-assertion 1.0", "AssertionError", "arithmetic is off"]),
    ("system-exit", PluginBroken, ["raises-system-exit 1.0", "SystemExit", "left early"]),
    ("when-called", PluginBroken, ["raises-when-called 1.0", "KeyError", "lost"]),
    ("no-spec", PluginBroken, ["has-no-spec 1.0", "has_no_spec:spec", "AttributeError"]),
    ("wrong-type", PluginBroken, ["wrong-type 1.0", "expected a SchedulerSpec", "got dict"]),
    ("wrong-name", PluginBroken, ["wrong-name 1.0", "'another'"]),
    (
        "twin",
        AmbiguousPlugin,
        ["twin-first 1.0", "twin-second 1.0", "twin-first:twin or twin-second:twin"],
    ),
    ("future", SpiMismatch, ["from-the-future 1.0", "99.0", "upgrade headstock"]),
    ("next", SpiMismatch, ["next-edition 1.0", "0.4", "upgrade headstock"]),
    (
        "later",
        SpiMismatch,
        ["next-revision 1.0", "0.3.9", OFFERED, "upgrade headstock"],
    ),
    (
        "past",
        SpiMismatch,
        ["from-the-past 1.0", "0.2", OFFERED, "upgrade from-the-past"],
    ),
    ("ancient", SpiMismatch, ["lost-a-name 1.0", "0.1", "read docs/plugins.md#versions-of"]),
    ("antique", SpiMismatch, ["lost-a-field 1.0", "0.1", "upgrade lost-a-field"]),
    ("soun", UnknownPlugin, ["did you mean sound?", "sound (sound-plugin 1.0)"]),
    ("no-such-dist:twin", UnknownPlugin, ["no-such-dist:twin"]),
]


@pytest.mark.parametrize(
    ("name", "error", "words"), EXPECTED, ids=[name for name, _, _ in EXPECTED]
)
def test_a_broken_plugin_is_named_with_its_distribution_and_its_reason(
    broken: Path, name: str, error: type[HeadstockError], words: list[str]
) -> None:
    with pytest.raises(error) as caught:
        registry.load_spec("scheduler", name)
    assert type(caught.value) is error
    assert [part for part in words if part not in str(caught.value)] == []
    assert "\n" not in str(caught.value)


def test_the_others_keep_working(broken: Path) -> None:
    assert registry.load_spec("scheduler", "sound").name == "sound"
    results = {plugin.distribution: result for plugin, result in registry.load_specs("scheduler")}
    failed = {name for name, result in results.items() if isinstance(result, HeadstockError)}
    working = {"sound-plugin", "needs-kernels", "needs-either", "breaks-late"}
    assert failed == {dist.name for dist in DISTS if dist.kind == "scheduler"} - working


def test_one_of_two_providers_is_chosen_by_its_distribution(broken: Path) -> None:
    plugins = [entry for entry in registry.list_installed("scheduler") if entry.name == "twin"]
    assert [(entry.distribution, entry.status) for entry in plugins] == [
        ("twin-first", "duplicate"),
        ("twin-second", "duplicate"),
    ]
    for distribution in ("twin-first", "Twin_Second"):
        registry.load_spec("scheduler", f"{distribution}:twin")
    assert {"twin_first", "twin_second"} <= sys.modules.keys()


def test_a_clash_is_found_before_anything_is_loaded(broken: Path) -> None:
    with pytest.raises(AmbiguousPlugin):
        registry.load_spec("scheduler", "twin")
    assert not {"twin_first", "twin_second"} & sys.modules.keys()


def test_listing_loads_nothing(broken: Path) -> None:
    distributions = {entry.distribution for entry in registry.list_installed()}
    assert {dist.name for dist in DISTS} <= distributions
    assert not {dist.package for dist in DISTS} & sys.modules.keys()


def test_a_missing_requirement_is_found_without_importing(broken: Path) -> None:
    spec = registry.load_spec("scheduler", "needy")
    (reason,) = registry.find_missing(spec)
    assert reason.message == "no-such-kernels >=2 is not installed"
    with pytest.raises(CannotRun, match=r"needs-kernels 1\.0.*install with: pip install kernels"):
        registry.require_installed(spec)


def test_alternatives_that_are_all_missing_are_all_named(broken: Path) -> None:
    (reason,) = registry.find_missing(registry.load_spec("scheduler", "choosy"))
    assert "no-such-kernels is not installed and attrs: expected" in reason.message
    assert reason.hint == "pip install 'no-such-kernels'"


def test_a_requirement_that_is_met_is_not_mentioned(broken: Path) -> None:
    registry.require_installed(registry.load_spec("scheduler", "sound"))


def test_an_implementation_that_cannot_be_imported_is_broken(broken: Path) -> None:
    with pytest.raises(
        PluginBroken, match=r"breaks-late 1\.0.*breaks_late_inside:choose.*ModuleNotFoundError"
    ):
        registry.import_implementation(registry.load_spec("scheduler", "late"))


def test_an_implementation_is_what_the_path_names(broken: Path) -> None:
    import json

    assert registry.import_implementation(registry.load_spec("scheduler", "sound")) is json.loads


@pytest.mark.parametrize(
    ("declared", "offered"),
    [
        ({"sound": "0, 3", "later": "0, 3, 9"}, (0, 3, 9)),
        ({"sound": "0, 3", "later": "0, 3, 9"}, (0, 3, 17)),
    ],
)
def test_a_plugin_runs_on_its_revision_and_every_later_one(
    broken: Path, declared: dict[str, str], offered: tuple[int, int, int]
) -> None:
    for name, version in declared.items():
        spec = registry.load_spec("scheduler", name, {"scheduler": offered})
        assert str(spec.spi) == version.replace(", ", ".")


@pytest.mark.parametrize("name", ["sound", "later", "past"])
def test_a_plugin_of_an_earlier_edition_is_refused_and_is_the_side_to_upgrade(
    broken: Path, name: str
) -> None:
    with pytest.raises(SpiMismatch, match=r"offers 0\.4\.4; upgrade [a-z-]+: pip") as caught:
        registry.load_spec("scheduler", name, {"scheduler": (0, 4, 4)})
    assert "upgrade headstock" not in str(caught.value)


def test_a_version_that_the_source_does_not_spell_is_found_when_the_plugin_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = scheduler_module("computed", version="*(0, 1)")
    write_installed(tmp_path, (Dist(name="computed", plugin="computed", module=module),))
    monkeypatch.syspath_prepend(tmp_path)
    assert registry.find_mismatch(registry.find_plugin("scheduler", "computed")) is None
    with pytest.raises(SpiMismatch, match=r"version 0\.1 "):
        registry.load_spec("scheduler", "computed")


def test_the_version_of_the_function_itself_counts_where_a_module_has_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = "def other():\n    return SpiRange(0, 3)\n"
    module = scheduler_module("many", version="0, 1") + other
    write_installed(tmp_path, (Dist(name="many-versions", plugin="many", module=module),))
    monkeypatch.syspath_prepend(tmp_path)
    assert "version 0.1" in str(registry.find_mismatch(registry.find_plugin("scheduler", "many")))
