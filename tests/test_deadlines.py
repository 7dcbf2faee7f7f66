"""No test may fail because the machine is busy, but those that are `full`."""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from source_tree import ROOT, files, tree

PROFILE = ROOT / "tests" / "conftest.py"
TIMED = ("gpu", "benchmarks", "clients", "browser", "perfetto")
"""Folders whose tests other sessions run."""
LEAST_BOUND = 300
"""Seconds that a test must wait before it takes something to hang."""
POLL = 0.5
"""Seconds up to which a wait is a pause between looks."""
CLOCKS = ("monotonic", "perf_counter", "time")
WAITS = ("wait", "join", "result", "get", "acquire", "communicate")
BOUND = re.compile(rf"timeout=\d|\.({'|'.join(WAITS)})\(\d|time\.({'|'.join(CLOCKS)})\(\)")
"""What a file must have to hold a short bound: few do, and to parse all of them takes seconds."""


def list_deadlines(module: ast.Module) -> Iterator[int]:
    """The lines on which a call is given a `deadline`."""
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and any(each.arg == "deadline" for each in node.keywords):
            yield node.lineno


def test_the_profile_has_no_deadline_and_neither_has_what_is_made_from_it() -> None:
    assert settings().deadline is None
    assert settings(max_examples=7).deadline is None


@settings(max_examples=1)
@given(st.none())
def test_an_example_may_take_longer_than_the_deadline_of_hypothesis(nothing: None) -> None:
    time.sleep(0.25)  # Hypothesis allows 0.2 s where no profile says otherwise


def test_no_test_sets_a_deadline_of_its_own() -> None:
    assert list(list_deadlines(tree(PROFILE))) != []
    # Few files name it, and to parse all of them takes seconds.
    others = [
        path
        for path in files(ROOT / "tests")
        if path != PROFILE and "deadline" in path.read_text("utf-8")
    ]

    assert [
        f"{path.relative_to(ROOT)}:{line}" for path in others for line in list_deadlines(tree(path))
    ] == []


def is_clock_read(node: ast.AST) -> bool:
    """Whether a node reads a clock that goes on while other processes run."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "time"
        and node.func.attr in CLOCKS
    )


def is_short(node: ast.AST | None) -> bool:
    """Whether a node is a number of seconds in which a busy machine may not get there."""
    return (
        isinstance(node, ast.Constant)
        and isinstance(node.value, int | float)
        and not isinstance(node.value, bool)
        and POLL < node.value < LEAST_BOUND
    )


def is_full(node: ast.AST) -> bool:
    """Whether a node is a test that `nox -s full` alone runs."""
    return isinstance(node, ast.FunctionDef) and any(
        isinstance(each, ast.Attribute) and each.attr == "full" for each in node.decorator_list
    )


def has_default_test(module: ast.Module) -> bool:
    """Whether a module has a test that is not full, or none, as what tests share has."""
    tests = [
        node
        for node in module.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    return not tests or not all(map(is_full, tests))


def list_short_bounds(node: ast.AST) -> Iterator[int]:
    """The lines that fail, or give up, where something takes a while."""
    if is_full(node):
        return
    match node:
        # time.monotonic() + 5, the end of a loop that waits
        case ast.BinOp(left=left, op=ast.Add(), right=right) if is_clock_read(left):
            if is_short(right):
                yield node.lineno
        # assert time.monotonic() - began < 5
        case ast.Compare(left=ast.BinOp(left=left, op=ast.Sub()), ops=ops, comparators=[most]):
            if is_clock_read(left) and isinstance(ops[0], ast.Lt | ast.LtE) and is_short(most):
                yield node.lineno
        # thread.join(5), subprocess.run(..., timeout=5)
        case ast.Call(func=ast.Attribute(attr=name), args=args, keywords=keywords):
            limits = [each.value for each in keywords if each.arg == "timeout"]
            if name in WAITS and len(args) == 1:
                limits += args
            if any(map(is_short, limits)):
                yield node.lineno
    for child in ast.iter_child_nodes(node):
        yield from list_short_bounds(child)


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("thread.join(30)", True),
        ("thread.join(0.02)", False),
        ("thread.join(600)", False),
        ("subprocess.run(command, timeout=150)", True),
        ("subprocess.run(command, timeout=600)", False),
        ("end = time.monotonic() + 5", True),
        ("assert time.perf_counter() - began < 2", True),
        ("assert time.perf_counter() - began > 2", False),
        ("@pytest.mark.full\ndef test(): thread.join(30)", False),
        ("@pytest.mark.feature('x')\ndef test(): thread.join(30)", True),
    ],
)
def test_a_short_bound_is_found(line: str, is_found: bool) -> None:
    assert bool(list(list_short_bounds(ast.parse(line)))) is is_found
    assert BOUND.search(line) or not is_found


def test_no_default_test_waits_for_a_bound_that_a_busy_machine_needs() -> None:
    paths: list[Path] = [
        path
        for path in files(ROOT / "tests")
        if not set(TIMED) & set(path.relative_to(ROOT).parts)
        and BOUND.search(path.read_text("utf-8"))
    ]
    assert [
        f"{path.relative_to(ROOT)}:{line}"
        for path in paths
        if has_default_test(tree(path))
        for line in list_short_bounds(tree(path))
    ] == []
