"""Plugins receive the records that core makes: they neither construct one nor list its fields."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from source_tree import ROOT, command_packages, files, packages, tree

from headstock import spi

GUIDE = ROOT / "docs" / "plugins.md"
LISTING = ("fields", "fields_dict", "asdict", "astuple")


def host_records() -> list[str]:
    """The records that the guide says core alone makes."""
    section = GUIDE.read_text().partition("\nMade by core: ")[2].partition("\n\n")[0]
    return re.findall(r"`(\w+)`", section)


def misuses(module: ast.Module, made_by_core: set[str]) -> set[str]:
    """The records of the contract that a module constructs though core makes them, or lists."""
    names = {
        alias.asname or alias.name: alias.name
        for node in ast.walk(module)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("headstock.spi")
        for alias in node.names
    }
    found = set()
    for node in ast.walk(module):
        match node:
            case ast.Call(func=ast.Name(id=name)) if names.get(name) in made_by_core:
                found.add(names[name])
            case ast.Call(func=ast.Attribute(value=ast.Name("spi"), attr=name)) if (
                name in made_by_core
            ):
                found.add(name)
            case ast.Call(
                func=ast.Name(id=function) | ast.Attribute(attr=function),
                args=[ast.Name(id=name), *_],
            ) if function in LISTING and name in names:
                found.add(names[name])
    return found


def test_the_search_finds_what_plugins_may_not_do() -> None:
    head = "import attrs\nfrom headstock import spi\nfrom headstock.spi import Batch as B, Sample\n"
    for wrong, name in {
        "B(tokens=1)": "Batch",
        "spi.Batch(tokens=1)": "Batch",
        "attrs.fields_dict(Sample)": "Sample",
        "attrs.fields(Sample)": "Sample",
        "asdict(B)": "Batch",
    }.items():
        assert misuses(ast.parse(head + wrong), {"Batch"}) == {name}, wrong
    for right in ("Sample(tokens=1)", "attrs.evolve(batch, tokens=1)", "B | None", "asdict(Own)"):
        assert misuses(ast.parse(head + right), {"Batch"}) == set(), right


def test_the_guide_lists_records_of_the_contract() -> None:
    listed = host_records()
    assert {"Batch", "AttentionStep", "View", "Program"} <= set(listed)
    assert set(listed) <= set(spi.__all__)


NO_PLUGINS = {"headstock_conformance"}
"""The checks of plugins give these what core would."""


@pytest.mark.parametrize("package", sorted({*packages()} - {*command_packages()} - NO_PLUGINS))
def test_a_plugin_neither_makes_nor_lists_records_of_core(package: str) -> None:
    made_by_core = set(host_records())
    found = {
        name
        for path in files(Path(packages()[package]))
        for name in misuses(tree(path), made_by_core)
    }
    assert found == set()
