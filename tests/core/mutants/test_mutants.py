"""The tests of docs/reliability.md notice the broken engines that it says they notice, in words
that name the fault.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from feature_table import TESTS

from .broken import MUTANTS, Mutant
from .broken_answers import MISTAKEN
from .broken_drafts import DRAFTED
from .broken_rules import NEGLECTED
from .broken_vectors import MISPOOLED
from .session import failures
from .table import TABLE

ALL = MUTANTS | NEGLECTED | MISTAKEN | MISPOOLED | DRAFTED
NODES = {catch.test: f"{TESTS / catch.file}::{catch.test}" for catch in TABLE}


@pytest.mark.parametrize("name", ALL)
def test_the_tests_of_its_rows_notice_a_broken_engine(name: str, tmp_path: Path) -> None:
    tests = {catch.test for catch in TABLE if catch.mutant == name}
    assert tests, "docs/reliability.md does not name it"
    said = failures(ALL[name], [NODES[test] for test in sorted(tests)], tmp_path / "session")

    assert not tests - said.keys(), "these tests do not notice it"
    unlike = {test: words for test, words in said.items() if not re.search(ALL[name].said, words)}
    assert not unlike, "these fail for another reason"


def test_nothing_is_noticed_in_the_engine_as_it_is(tmp_path: Path) -> None:
    sound = Mutant(lambda patch: None, "")

    assert failures(sound, [NODES["test_abort_takes_the_whole_id"]], tmp_path / "session") == {}
