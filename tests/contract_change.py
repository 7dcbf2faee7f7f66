"""What changed between two states of the contract: which kinds it reaches, and how far each has to
be raised.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from enum import IntEnum
from typing import Any

from attrs import frozen

SPI = "headstock.spi"
Version = tuple[int, int, int]


class Level(IntEnum):
    """How much of a change something is."""

    SAME = 0
    REVISION = 1
    EDITION = 2


@frozen
class Contract:
    """A lock as read.

    roots: kind -> names of the contract that its plugins are made of
    libraries: package beside the contract -> the kinds whose plugins may import it
    names: (module, public name) -> the node that describes it
    """

    locked: bool
    versions: Mapping[str, Version]
    roots: Mapping[str, tuple[str, ...]]
    libraries: Mapping[str, tuple[str, ...]]
    names: Mapping[tuple[str, str], ast.stmt]


def parse_contract(text: str) -> Contract:
    """Parse the text of a lock."""
    header: dict[str, Any] = {}
    names: dict[tuple[str, str], ast.stmt] = {}
    module = ""
    for node in ast.parse(text).body:
        match node:
            case ast.Assign(targets=[ast.Name("module")], value=ast.Constant(str(name))):
                module = name
            case ast.Assign(targets=[ast.Name(name)], value=value) if not module:
                header[name] = ast.literal_eval(value)
            case ast.Assign(targets=[ast.Name(name)]) | ast.AnnAssign(target=ast.Name(name)):
                names[module, name] = node
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                names[module, name] = node
    return Contract(**header, names=names)


def find_violations(before_text: str, after_text: str) -> list[str]:
    """What forbids to replace one lock by another: a line for each kind that was not raised."""
    before, after = parse_contract(before_text), parse_contract(after_text)
    if not before.locked:
        return []
    # A new edition is open until it has what the next features use.
    is_new = all(
        after.versions.get(kind, version)[:2] > version[:2]
        for kind, version in before.versions.items()
    )
    problems = []
    if not (after.locked or is_new):
        problems.append("the lock says locked = True and cannot be unlocked")
    reasons = find_changes(before, after)
    for kind, version in before.versions.items():
        if kind not in after.versions:
            problems.append(f"{kind}: the kind is gone; what plugins were made for must stay")
            continue
        changes = reasons.get(kind, {})
        wanted = raise_version(version, max(changes.values(), default=Level.SAME))
        if after.versions[kind] < wanted:
            names = ", ".join(f"{name} ({level.name.lower()})" for name, level in changes.items())
            problems.append(
                f"{kind}: version {after.versions[kind]}, wanted at least {wanted}: "
                + (names or "a version is never lowered")
            )
    return problems


def raise_version(version: Version, level: Level) -> Version:
    """The least version after a change of this level."""
    major, edition, revision = version
    return {
        Level.SAME: version,
        Level.REVISION: (major, edition, revision + 1),
        Level.EDITION: (major, edition + 1, 0),
    }[level]


def find_changes(before: Contract, after: Contract) -> dict[str, dict[str, Level]]:
    """Kind -> changed name -> how much of a change it is to plugins of that kind."""
    reached = {
        kind: reach(before, before.roots.get(kind, ())) | reach(after, after.roots.get(kind, ()))
        for kind in {**before.versions, **after.versions}
    }
    changes: dict[str, dict[str, Level]] = {}
    for key in sorted({*before.names, *after.names}):
        level = compare(before.names.get(key), after.names.get(key))
        if level is Level.SAME:
            continue
        module, name = key
        for kind in kinds_of(module, name, reached, {**before.libraries, **after.libraries}):
            changes.setdefault(kind, {})[f"{module}.{name}"] = level
    return changes


def kinds_of(
    module: str,
    name: str,
    reached: Mapping[str, set[str]],
    libraries: Mapping[str, tuple[str, ...]],
) -> Iterable[str]:
    """The kinds that a change of a name concerns; all of them when no signature reaches it."""
    for package, kinds in libraries.items():
        if module == package or module.startswith(f"{package}."):
            return kinds
    return [kind for kind, names in reached.items() if name in names] or list(reached)


def reach(contract: Contract, roots: Iterable[str]) -> set[str]:
    """The names of headstock.spi that the signatures of `roots` mention, and theirs in turn."""
    reached: set[str] = set()
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        if name not in reached and (SPI, name) in contract.names:
            reached.add(name)
            waiting.extend(mentioned_names(contract.names[SPI, name]))
    return reached


def mentioned_names(node: ast.AST) -> Iterator[str]:
    """The identifiers in types, bases and defaults, also within quotes."""
    for each in ast.walk(node):
        match each:
            case ast.Name(id=name, ctx=ast.Load()):
                yield name
            case ast.Attribute(attr=name):
                yield name
            case ast.Constant(value=str(text)):
                yield from re.findall(r"[A-Za-z_]\w*", text)


def compare(before: ast.AST | None, after: ast.AST | None) -> Level:
    """How much of a change it is from one description of a name to another."""
    if after is None:
        return Level.EDITION
    if before is None:
        return Level.REVISION
    if ast.unparse(before) == ast.unparse(after):
        return Level.SAME
    match before, after:
        case ast.ClassDef(), ast.ClassDef():
            return compare_classes(before, after)
        case ast.FunctionDef(), ast.FunctionDef():
            return compare_functions(before, after)
        case ast.Assign(value=old), ast.Assign(value=new):
            old_members, new_members = union_members(old), union_members(new)
            if len(old_members) > 1 and new_members[: len(old_members)] == old_members:
                return Level.REVISION
    return Level.EDITION


def union_members(node: ast.expr) -> list[str]:
    """The types that a union is made of, in order; one for what is no union."""
    match node:
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return [*union_members(left), *union_members(right)]
        case ast.Subscript(value=ast.Name("Union"), slice=ast.Tuple(elts=members)):
            return [ast.unparse(member) for member in members]
    return [ast.unparse(node)]


def compare_classes(before: ast.ClassDef, after: ast.ClassDef) -> Level:
    """How much of a change it is from a class to its new state."""
    bases = [ast.unparse(base) for base in before.bases]
    if bases != [ast.unparse(base) for base in after.bases]:
        return Level.EDITION
    old_methods, new_methods = methods(before), methods(after)
    levels = [compare_members(values(before), values(after)), compare_fields(before, after)]
    for name, method in new_methods.items():
        if name in old_methods:
            levels.append(compare(old_methods[name], method))
        # Who implements the class lacks an abstract method, and one of a protocol.
        elif "abstractmethod" in decorators(method) or "Protocol" in bases or name == "__init__":
            levels.append(Level.EDITION)
        else:
            levels.append(Level.REVISION)
    levels += [Level.EDITION for name in old_methods if name not in new_methods]
    return max(levels)


def methods(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    """The methods of a class."""
    return {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}


def decorators(node: ast.FunctionDef) -> list[str]:
    """The names of a function's decorators."""
    return [ast.unparse(each) for each in node.decorator_list]


def values(node: ast.ClassDef) -> list[tuple[str, str]]:
    """The members of an enum, and other attributes with a value, in order."""
    return [
        (ast.unparse(each.targets[0]), ast.unparse(each.value))
        for each in node.body
        if isinstance(each, ast.Assign)
    ]


def compare_members(before: list[tuple[str, str]], after: list[tuple[str, str]]) -> Level:
    """A new member is a revision; the others keep value and order."""
    if before == after:
        return Level.SAME
    return Level.REVISION if [each for each in after if each in before] == before else Level.EDITION


def compare_fields(before: ast.ClassDef, after: ast.ClassDef) -> Level:
    """A new field with a default is a revision, by position only behind all others."""
    (old_places, old_names), (new_places, new_names) = fields(before), fields(after)
    return max(
        compare_places(old_places, new_places),
        compare_keywords(old_names, new_names),
    )


def fields(node: ast.ClassDef) -> tuple[list[tuple[str, str, bool]], list[tuple[str, str, bool]]]:
    """The fields by position and those by keyword alone: name, description, has a default."""
    places: list[tuple[str, str, bool]] = []
    keywords: list[tuple[str, str, bool]] = []
    target = places
    for each in node.body:
        if not isinstance(each, ast.AnnAssign):
            continue
        name = ast.unparse(each.target)
        if name == "_":
            target = keywords
        else:
            target.append((name, ast.unparse(each), each.value is not None))
    return places, keywords


def compare_places(
    before: list[tuple[str, str, bool]], after: list[tuple[str, str, bool]]
) -> Level:
    """Compare what is given by position."""
    if after[: len(before)] != before:
        return Level.EDITION
    return grade_added(after[len(before) :])


def compare_keywords(
    before: list[tuple[str, str, bool]], after: list[tuple[str, str, bool]]
) -> Level:
    """Compare what is given by keyword alone; its order says nothing."""
    if not set(before) <= set(after):
        return Level.EDITION
    return grade_added([each for each in after if each not in before])


def grade_added(added: list[tuple[str, str, bool]]) -> Level:
    """What is new is a revision when all of it has a default."""
    if not added:
        return Level.SAME
    return Level.REVISION if all(optional for _, _, optional in added) else Level.EDITION


def compare_functions(before: ast.FunctionDef, after: ast.FunctionDef) -> Level:
    """A new keyword-only argument with a default is a revision."""
    old, new = before.args, after.args
    if (decorators(before), head_text(before)) != (decorators(after), head_text(after)):
        return Level.EDITION
    return compare_keywords(keyword_arguments(old), keyword_arguments(new))


def head_text(node: ast.FunctionDef) -> str:
    """A signature without its keyword-only arguments."""
    arguments = ast.arguments(
        posonlyargs=node.args.posonlyargs,
        args=node.args.args,
        vararg=node.args.vararg,
        kwonlyargs=[],
        kw_defaults=[],
        kwarg=node.args.kwarg,
        defaults=node.args.defaults,
    )
    returns = "" if node.returns is None else ast.unparse(node.returns)
    return f"({ast.unparse(arguments)}) -> {returns}"


def keyword_arguments(arguments: ast.arguments) -> list[tuple[str, str, bool]]:
    """The keyword-only arguments: name, description, has a default."""
    return [
        (
            argument.arg,
            f"{ast.unparse(argument)} = {default and ast.unparse(default)}",
            bool(default),
        )
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
