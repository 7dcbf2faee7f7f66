"""The table of docs/reliability.md: which test is to notice which broken engine."""

from __future__ import annotations

import re
from collections.abc import Iterator

from attrs import frozen
from feature_table import LINK, TESTS

PAGE = TESTS.parent / "docs" / "reliability.md"
ROW = re.compile(r"\| ([A-Z]\d+) \|[^|]*\|([^|]*)\|")


@frozen
class Catch:
    """A test of the row of `bug`, and one of the broken engines that it notices."""

    bug: str
    file: str
    test: str
    mutant: str


def catches(page: str) -> Iterator[Catch]:
    """All that the table of a page says: in a row's last column,
    `[test](file): broken engine, broken engine`.

    raises: ValueError when a line of the column says something else
    """
    for bug, column in ROW.findall(page):
        for line in column.strip().split("<br>"):
            link, _, mutants = line.partition(": ")
            if not (found := LINK.fullmatch(link)) or not mutants:
                raise ValueError(
                    f"{bug}: expected a link to a test and the broken engines it detects, got "
                    f"{line!r}"
                )
            for mutant in mutants.split(", "):
                yield Catch(bug, found[2], found[1], mutant)


TABLE = tuple(catches(PAGE.read_text(encoding="utf-8")))
