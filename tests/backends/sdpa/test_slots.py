"""Where the sdpa backend cuts rows into buckets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headstock.spi import GraphSupport
from headstock_sdpa.plugin import spec
from headstock_sdpa.slots import bucket_bounds


@given(
    lens=st.lists(st.integers(1, 100), min_size=1, max_size=20).map(
        lambda lens: sorted(lens, reverse=True)
    ),
    least=st.integers(1, 200),
    most=st.integers(1, 500),
)
def test_buckets_cover_all_rows_within_the_bound(lens: list[int], least: int, most: int) -> None:
    cuts = list(bucket_bounds(lens, least, most))
    assert [row for first, last in cuts for row in range(first, last)] == list(range(len(lens)))
    assert all(first < last for first, last in cuts)
    assert all(last - first == 1 or (last - first) * lens[first] <= most for first, last in cuts)


def test_a_cut_must_be_worth_its_cost() -> None:
    assert list(bucket_bounds([100, 100, 10, 10], 180, 10**6)) == [(0, 2), (2, 4)]
    assert list(bucket_bounds([100, 100, 10, 10], 181, 10**6)) == [(0, 4)]
    assert list(bucket_bounds([100, 80, 80, 80], 1, 10**6)) == [(0, 4)]


def test_the_spec_claims_no_graphs_and_every_shape() -> None:
    claims = spec().capabilities
    assert claims.graph is GraphSupport.NEVER
    assert all(
        number in sizes
        for number in (1, 7, 4096)
        for sizes in (claims.page_sizes, claims.head_dims)
    )
