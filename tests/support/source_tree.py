"""The repository's source files as syntax trees, and what can be asked of them."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from attrs import frozen

ROOT = Path(__file__).parents[2]
CORE = ROOT / "core" / "src" / "headstock"
PLUGINS = sorted(path.parent for path in ROOT.glob("[!.]*/*/pyproject.toml"))
"""The folders of all members but core."""
CONFORMANCE = ROOT / "plugins" / "conformance"
"""The member that is no plugin: checks of plugins, which look into core."""


@frozen
class Import:
    """One imported name, fully dotted. `early` is whether importing the module runs it."""

    name: str
    line: int
    early: bool

    def inside(self, *packages: str) -> bool:
        """Whether the name is one of the packages or lies in one."""
        return any(self.name == each or self.name.startswith(f"{each}.") for each in packages)


def files(folder: Path) -> list[Path]:
    """The Python files of a folder, or the one file given."""
    return [folder] if folder.suffix == ".py" else sorted(folder.rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    """The file's syntax tree; every asker gets the same one and leaves it as it is."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def imports(module: ast.Module) -> list[Import]:
    """What the module imports. `from a import b` counts as `a.b`."""
    return [each for node in module.body for each in walk(node, early=True)]


def walk(node: ast.AST, *, early: bool) -> Iterator[Import]:
    """The imports below a node; those in functions and under TYPE_CHECKING do not run on import."""
    match node:
        case ast.Import(names=names):
            yield from (Import(each.name, node.lineno, early) for each in names)
        case ast.ImportFrom(module=module, names=names, level=level):
            base = "." * level + (module or "")
            yield from (Import(f"{base}.{each.name}", node.lineno, early) for each in names)
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
            early = False
    if isinstance(node, ast.If) and any(map(is_type_checking, ast.walk(node.test))):
        early = False
    for child in ast.iter_child_nodes(node):
        yield from walk(child, early=early)


def is_type_checking(node: ast.AST) -> bool:
    """Whether a node is `TYPE_CHECKING`, or an attribute of that name."""
    return "TYPE_CHECKING" in (getattr(node, "id", ""), getattr(node, "attr", ""))


def plugin_names() -> dict[str, str]:
    """Name -> the member that provides it, of every first-party plugin."""
    found = {}
    for member in [ROOT / "core", *PLUGINS]:
        groups = read_groups(member)
        found |= {
            name: str(member.relative_to(ROOT)) for group in groups.values() for name in group
        }
    return found


@cache
def packages() -> dict[str, Path]:
    """Import name -> source folder, of every member but core."""
    return {
        path.name: path
        for member in PLUGINS
        for path in (member / "src").glob("*")
        if path.is_dir()
    }


@cache
def command_packages() -> list[str]:
    """The import names of the members that add a verb to the command line, or start ranks: they
    may use what core exports.
    """
    return [
        path.name
        for member in PLUGINS
        if {"headstock.command", "headstock.executor"} & read_groups(member).keys()
        for path in (member / "src").glob("*")
    ]


def base_packages(package: str) -> list[str]:
    """The import names of the members that a member builds on, but core."""
    names = {read_project(member)["name"]: member for member in PLUGINS}
    (member,) = (each for each in PLUGINS if (each / "src" / package).is_dir())
    project = read_project(member)
    needs = [*project["dependencies"], *chain(*project.get("optional-dependencies", {}).values())]
    return [
        path.name for each in needs if each in names for path in (names[each] / "src").glob("*")
    ]


def read_groups(member: Path) -> dict[str, dict[str, str]]:
    """The entry points of a member by group; the checks of plugins have none."""
    groups: dict[str, dict[str, str]] = read_project(member).get("entry-points", {})
    return groups


def core_packages() -> list[str]:
    """The names of core's packages."""
    return sorted(path.parent.name for path in CORE.glob("*/__init__.py"))


@cache
def exports(path: Path) -> set[str]:
    """The names in a module's `__all__`."""
    for node in tree(path).body:
        match node:
            case ast.Assign(targets=[ast.Name("__all__")], value=ast.List(elts=names)):
                return {name.value for name in names if isinstance(name, ast.Constant)}
    return set()


@cache
def read_project(member: Path) -> dict[str, Any]:
    """The `project` table of a member's pyproject.toml."""
    project: dict[str, Any] = tomllib.loads((member / "pyproject.toml").read_text())["project"]
    return project
