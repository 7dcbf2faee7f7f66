"""Nothing of the contract is dead: each public name has a case, a user, or a reason to wait.

A new field gets a case in a module beside this one: what changes when it changes. Where another
test shows that already, `named.SHOWN` names it. What comes before its first user goes to
`named.WAITING`, with the feature that will use it.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from enum import Enum
from functools import cache, cached_property

import attrs
import pytest
from contract_change import parse_contract
from source_tree import CONFORMANCE, CORE, PLUGINS, ROOT, files, imports, tree
from spi_lock import LOCK

from headstock import spi

from . import claims, models, replays, schedules, steps, terms
from .named import SHOWN, UNUSED, WAITING
from .vary import Case

MODULES = (claims, terms, models, steps, schedules, replays)
CASES: Mapping[str, Case] = {
    name: case for module in MODULES for name, case in module.CASES.items()
}


@pytest.mark.parametrize("name", CASES)
def test_a_field_that_changes_changes_an_outcome(name: str) -> None:
    before, after = CASES[name]()
    assert before != after
    assert " at 0x" not in repr(before), "an address differs in every run"


def classes() -> Iterator[tuple[str, type]]:
    """The public classes of the contract."""
    for name in spi.__all__:
        value = getattr(spi, name)
        if isinstance(value, type):
            yield name, value


def fields() -> Iterator[str]:
    """The fields of records and the members of enums."""
    for name, kind in classes():
        if attrs.has(kind):
            yield from (f"{name}.{each.name}" for each in attrs.fields(kind) if not each.inherited)
        elif issubclass(kind, Enum):
            yield from (f"{name}.{member.name}" for member in kind)


def methods() -> Iterator[str]:
    """The public methods and properties of the contract's classes."""
    for name, kind in classes():
        for each, member in vars(kind).items():
            called = inspect.isfunction(member) or isinstance(
                member, property | cached_property | classmethod
            )
            if called and not each.startswith("_"):
                yield f"{name}.{each}"


@cache
def shipped_words() -> Mapping[str, frozenset[str]]:
    """The words of all that serves requests, by path.

    Checks of plugins are left out: what they alone use is as dead as before.
    """
    folders = [CORE, *(member / "src" for member in PLUGINS if member != CONFORMANCE)]
    return {
        str(path.relative_to(ROOT)): frozenset(re.findall(r"\w+", path.read_text("utf-8")))
        for folder in folders
        for path in files(folder)
    }


def find_used(names: Set[str], read: Callable[[str, ast.Module], set[str]]) -> set[str]:
    """Those of the dotted names that `read` finds in the path and the tree of a shipped file.

    Only files that have the last word of a name that is not found yet are parsed.
    """
    used: set[str] = set()
    for path, words in shipped_words().items():
        left = {name for name in names - used if name.rpartition(".")[2] in words}
        if left:
            used |= left & read(path, tree(ROOT / path))
    return used


def test_every_field_has_a_case_or_a_reason() -> None:
    listed = Counter([*CASES, *SHOWN, *WAITING])
    names = set(fields())
    assert sorted(names - listed.keys()) == [], "give each a case, or a place in named.py"
    assert sorted(listed.keys() - names - set(methods())) == [], "the contract has no such field"
    assert [name for name, count in listed.items() if count > 1] == []


def test_the_tests_that_are_named_are_there() -> None:
    wanted: dict[str, set[str]] = {}
    for place in SHOWN.values():
        path, _, function = place.partition("::")
        wanted.setdefault(path, set()).add(function)
    for path, functions in wanted.items():
        there = {node.name for node in tree(ROOT / path).body if isinstance(node, ast.FunctionDef)}
        assert functions - there == set(), path


def test_every_method_is_called() -> None:
    def read(path: str, module: ast.Module) -> set[str]:
        return {
            node.attr
            for node in ast.walk(module)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
        }

    used = find_used({each.partition(".")[2] for each in methods()}, read)
    uncalled = {each for each in methods() if each.partition(".")[2] not in used}
    assert sorted(uncalled - WAITING.keys()) == [], "nothing calls them"
    assert sorted(WAITING.keys() & set(methods()) - uncalled) == [], "they have a caller by now"


def test_every_name_of_the_contract_is_imported() -> None:
    def read(path: str, module: ast.Module) -> set[str]:
        if path == "core/src/headstock/spi/__init__.py":
            return set()
        return {
            each.name.rpartition(".")[2] for each in imports(module) if each.inside("headstock.spi")
        }

    # It names the groups of entry points that nothing may use yet.
    names = set(spi.__all__) - {"RESERVED"}
    assert sorted(names - find_used(names, read)) == []


def test_every_name_of_the_libraries_has_a_user_or_a_reason() -> None:
    def read(path: str, module: ast.Module) -> set[str]:
        own = path.removeprefix("core/src/").removesuffix(".py").replace("/", ".")
        found = {each.name for each in imports(module)}
        # `noise.ROUNDS`, of a module that was imported whole.
        whole = {name.rpartition(".")[2]: name for name in found}
        return {name for name in found if not name.startswith(f"{own}.")} | {
            f"{whole[node.value.id]}.{node.attr}"
            for node in ast.walk(module)
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in whole
        }

    names = {
        f"{module}.{name}"
        for module, name in parse_contract(LOCK.read_text()).names
        if module not in ("headstock.spi", "headstock_conformance")
    }
    used = find_used(names, read)
    assert sorted(names - used - UNUSED.keys()) == [], "make them private, or say whom they are for"
    assert sorted(UNUSED.keys() - names) == []
    assert sorted(UNUSED.keys() & used) == [], "they have a user by now"
