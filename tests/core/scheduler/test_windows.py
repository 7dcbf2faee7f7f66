"""Rows that share prefixes of a model with a window group."""

from __future__ import annotations

import numpy as np
import pytest
from often import often
from toy_workloads import FULL, fewest_pages, limits, prompt, request, window

from headstock.errors import PluginBroken
from headstock.scheduler import Request
from headstock.spi import KVGroup, Match
from headstock_conformance.scheduler.toy_device import alone
from headstock_conformance.scheduler.toy_schedule import Drive, run
from headstock_radix_cache.policy import RadixCache

BOTH = (FULL, window(9))


def hits(drive: Drive) -> list[int]:
    """How many tokens of each admission came from the index."""
    return [
        int(start)
        for plan in drive.plans
        for row, start in zip(plan.rows, plan.starts, strict=True)
        if row in plan.new_row_ids
    ]


def branches(head: int) -> list[Request]:
    """Prompts that begin alike and part at some token."""
    rng = np.random.default_rng(head)
    tokens = prompt(rng, head)
    return [
        request(f"{head}-{number}", np.concatenate([tokens[:cut], prompt(rng, 7)]), 12)
        for number, cut in enumerate((head, head - 9, head // 2, 3, head))
    ]


@pytest.mark.parametrize("overlap", often(1, [True, False]))
@pytest.mark.parametrize("groups", [BOTH, BOTH[::-1], (FULL, window(1), window(30))], ids=len)
def test_rows_that_share_a_window_read_what_they_would_compute(
    groups: tuple[KVGroup, ...], overlap: bool
) -> None:
    counts = tuple(110 - 25 * number for number in range(len(groups)))
    bounds = limits(groups=groups, num_pages=counts, overlap=overlap)
    drive, requests = Drive(bounds), [*branches(50), *branches(31)]
    for one in requests:
        run(drive, one)
    again = [request(f"again {one.id}", one.prompt, 12) for one in requests]
    run(drive, *again)

    assert drive.outputs == {one.id: alone(one) for one in [*requests, *again]}
    # Some pages of a window were evicted; most prompts were found all the same.
    assert sum(hits(drive)) > 200 and hits(drive)[1] == 40


def test_pages_of_a_long_chunk_wait_to_be_indexed_unless_pages_are_short() -> None:
    tokens = prompt(np.random.default_rng(1), 100)
    found = []
    for pages in (200, 31):
        bounds = limits(
            groups=BOTH, num_pages=(200, pages), overlap=True, max_rows=2, max_batch_tokens=100
        )
        drive = run(Drive(bounds), request("a", tokens, 3))
        # With few pages the second prompt takes those that the first one has behind its window.
        drive.submit(request("b", tokens, 3))
        drive.submit(request("c", np.concatenate([[7], tokens[:90]]), 3))
        drive.drain()
        run(drive, request("d", tokens[:50], 3))
        found.append(hits(drive)[-1])
        assert drive.state.num_preempted == 0
    assert found == [48, 0]


@pytest.mark.parametrize("length", [1, 8, 19])
@pytest.mark.parametrize("size", [1, 4])
def test_a_prompt_that_just_fits_is_not_preempted_for_pages_that_wait_to_be_indexed(
    length: int, size: int
) -> None:
    sizes = {"page_size": size, "max_batch_tokens": 64, "max_rows": 1}
    pages = fewest_pages(window(length), **sizes)
    bounds = limits(
        groups=(FULL, window(length)), num_pages=(160 // size, pages), overlap=True, **sizes
    )
    one = request("a", prompt(np.random.default_rng(3), 140), 20)
    drive = run(Drive(bounds), one)

    assert drive.outputs["a"] == alone(one)
    assert drive.state.num_preempted == 0, "the only row was preempted"


class Forgetful(RadixCache):
    """It matches windows of which it has not every page."""

    def match_prefix(self, index: object, keys: np.ndarray, namespace: str) -> Match:
        match = super().match_prefix(index, keys, namespace)  # type: ignore[arg-type]
        pages = match.pages.copy()
        pages[1, -1:] = 0
        return Match(pages, match.handle)


class Flat(RadixCache):
    """It answers as if there were one group."""

    def match_prefix(self, index: object, keys: np.ndarray, namespace: str) -> Match:
        match = super().match_prefix(index, keys, namespace)  # type: ignore[arg-type]
        return Match(match.pages[0], match.handle)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (
            Forgetful,
            r"'Forgetful' matched 5 pages: in KV group 1, .* expected .* from 3 on, got \[.*3\]",
        ),
        (Flat, r"'Flat' matched a prefix: expected integers \[2, n\], .* got .* shape \(0,\)"),
    ],
)
def test_a_match_that_breaks_the_contract_names_the_plugin(
    policy: type[RadixCache], words: str
) -> None:
    drive = Drive(limits(groups=BOTH, policy=policy(4, BOTH)))
    tokens = prompt(np.random.default_rng(2), 21)
    with pytest.raises(PluginBroken, match=words):
        run(drive, request("a", tokens, 2), request("b", tokens, 2))
