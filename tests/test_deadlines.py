"""No test that draws at random may fail for being slow."""

from __future__ import annotations

import ast
import time
from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st
from source_tree import ROOT, files, tree

PROFILE = ROOT / "tests" / "conftest.py"


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
