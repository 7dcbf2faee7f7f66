"""Sets of integers that capabilities are made of."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headstock.spi import IntSet

LISTED = st.lists(st.integers(1, 12), min_size=1, max_size=4).map(lambda values: IntSet.of(*values))
MULTIPLES = st.builds(IntSet.multiples, st.integers(1, 5), st.none() | st.integers(1, 30))
SETS = LISTED | MULTIPLES
FAR = range(1, 200)


@given(SETS, SETS)
def test_one_set_is_within_another_when_the_other_has_all_of_it(one: IntSet, other: IntSet) -> None:
    assert (one <= other) == all(value in other for value in FAR if value in one)
