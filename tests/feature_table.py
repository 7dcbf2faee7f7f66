"""The table of tests/features.md: which behaviours are owed, and which tests show them.

`python tests/feature_table.py` rewrites the column of tests: those that carry an id of the row
(`@pytest.mark.feature("T6", "P11")`), and those that were entered by hand, as long as they exist.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from attrs import evolve, field, frozen

TESTS = Path(__file__).parent
PAGE = TESTS / "features.md"
NONE = "not yet"
LINK = re.compile(r"\[(test_\w+)\]\((?:\.\./tests/)?([\w/]+\.py)\)")
"""A link to a test, from a page in this folder or in docs."""


@frozen(order=True)
class Test:
    """A test function and its file, relative to the folder of tests."""

    file: str
    name: str
    ids: frozenset[str] = field(default=frozenset(), eq=False, order=False)

    @property
    def link(self) -> str:
        """The test as the page shows it."""
        return f"[{self.name}]({self.file})"


@frozen
class Row:
    """One line of the table. `missing` says what of the behaviour is not there yet."""

    ids: tuple[str, ...]
    behaviour: str
    tests: tuple[Test, ...]
    missing: str
    documented: str

    @property
    def line(self) -> str:
        """The row in Markdown."""
        tests = "<br>".join(test.link for test in self.tests) or NONE
        if self.tests and self.untested:
            tests += f"<br>{NONE}: {' '.join(self.untested)}"
        return (
            f"| {' '.join(self.ids)} | {self.behaviour} | {tests} | {self.missing} | "
            f"{self.documented} |"
        )

    @property
    def untested(self) -> tuple[str, ...]:
        """The words of its first column that no test carries."""
        carried = frozenset(id for test in self.tests for id in test.ids)
        return tuple(word for word in self.ids if carried.isdisjoint(spelt_out(word)))

    @property
    def all_ids(self) -> frozenset[str]:
        """Its ids, spans such as I1-I24 spelt out."""
        return frozenset(id for word in self.ids for id in spelt_out(word))


def spelt_out(word: str) -> Iterator[str]:
    """The ids that one word of the first column stands for: I1-I3 is I1, I2, I3."""
    first, _, last = word.partition("-")
    for number in range(int(first[1:]), int((last or first)[1:]) + 1):
        yield f"{first[0]}{number}"


def rows(page: str) -> list[Row]:
    """The rows of a page."""
    found = []
    for line in page.splitlines():
        if re.match(r"\| [A-Z]\d", line):
            ids, behaviour, tests, missing, documented = (
                cell.strip() for cell in line.strip()[1:-1].split("|")
            )
            named = tuple(Test(file, name) for name, file in LINK.findall(tests))
            found.append(Row(tuple(ids.split()), behaviour, named, missing, documented))
    return found


@cache
def all_tests() -> tuple[Test, ...]:
    """Every test function below the folder of tests, in order, with the ids that it carries."""
    return tuple(
        sorted(
            Test(path.relative_to(TESTS).as_posix(), node.name, marked_ids(node))
            for path in TESTS.rglob("test_*.py")
            for node in walk_statements(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and node.name.startswith("test_")
        )
    )


def walk_statements(node: ast.AST) -> Iterator[ast.stmt]:
    """The statements below a node, at any depth."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
            yield from walk_statements(child)


def marked_ids(function: ast.FunctionDef | ast.AsyncFunctionDef) -> frozenset[str]:
    """The ids in the function's `@pytest.mark.feature(...)` decorators."""
    return frozenset(
        argument.value
        for decorator in function.decorator_list
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.feature"
        for argument in decorator.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    )


def brought_up_to_date(row: Row, tests: Sequence[Test]) -> Row:
    """The row with the tests that there are."""
    return evolve(
        row, tests=tuple(test for test in tests if test in row.tests or test.ids & row.all_ids)
    )


def rewritten(page: str, tests: Sequence[Test]) -> str:
    """The page with every row brought up to date."""
    new = iter([brought_up_to_date(row, tests).line for row in rows(page)])
    return (
        "\n".join(
            next(new) if re.match(r"\| [A-Z]\d", line) else line for line in page.splitlines()
        )
        + "\n"
    )


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8"), all_tests()), encoding="utf-8")
