"""The tests of docs/reliability.md notice the broken engines that it says they notice, in words that name the fault."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from feature_table import TESTS

from .broken import MUTANTS
from .broken_rules import NEGLECTED
from .session import failures
from .table import TABLE

ALL = MUTANTS | NEGLECTED


@pytest.mark.parametrize("name", ALL)
def test_the_tests_of_its_rows_notice_a_broken_engine(name: str, tmp_path: Path) -> None:
    tests = {catch.test: f"{TESTS / catch.file}::{catch.test}" for catch in TABLE if catch.mutant == name}
    said = failures(ALL[name], tests.values(), tmp_path / "session")

    assert tests and not tests.keys() - said.keys(), "these tests do not notice it"
    unlike = {test: words for test, words in said.items() if not re.search(ALL[name].said, words)}
    assert not unlike, "these fail for another reason"
