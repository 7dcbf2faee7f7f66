"""The proposer `ngram`: what it guesses, compared with a search written out."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstock import registry
from headstock.cli.main import main
from headstock.errors import UsageError
from headstock_ngram_proposer.options import NgramOptions
from headstock_ngram_proposer.proposer import NgramProposer

TOKENS = st.lists(
    # Few different tokens, some of which share bytes: 0x01010101 is four times the byte of 1.
    st.sampled_from([0, 1, 256, 65536, 0x01010101, 0x00010001, 7]),
    min_size=1,
    max_size=40,
)


def guess(tokens: list[int], room: int, options: NgramOptions) -> list[int]:
    """The guesses at what follows one row."""
    row = np.array(tokens, np.int32)
    row.setflags(write=False)
    counts, drafts = NgramProposer(options).propose(
        [row], np.array([room], np.int32), np.array([1])
    )
    assert counts.tolist() == [len(drafts)] and drafts.dtype == np.int32
    return drafts.tolist()  # type: ignore[no-any-return]


def search(tokens: list[int], room: int, options: NgramOptions) -> list[int]:
    """What followed the longest match, and of equals the latest; written out."""
    for length in range(options.max_match, options.min_match - 1, -1):
        suffix = tokens[-length:]
        for start in range(len(tokens) - length - 1, -1, -1):
            if len(suffix) == length and tokens[start : start + length] == suffix:
                following = list(tokens)
                for at in range(start + length, start + length + room):
                    following.append(following[at])
                return following[len(tokens) :]
    return []


@pytest.mark.feature("T6", "R9")
@given(tokens=TOKENS, room=st.integers(1, 8), least=st.integers(1, 4), more=st.integers(0, 3))
def test_guesses_are_what_followed_the_longest_latest_match(
    tokens: list[int], room: int, least: int, more: int
) -> None:
    options = NgramOptions(min_match=least, max_match=least + more)
    assert guess(tokens, room, options) == search(tokens, room, options)


def test_a_sequence_that_repeats_itself_goes_on_so() -> None:
    assert guess([5, 1, 2, 3, 1, 2, 3], 5, NgramOptions()) == [1, 2, 3, 1, 2]
    assert guess([4, 4, 4], 3, NgramOptions()) == [4, 4, 4]
    assert guess([1, 2, 3, 4], 3, NgramOptions()) == []


def test_rows_are_guessed_one_by_one() -> None:
    rows = [np.array(each, np.int32) for each in ([1, 2, 9, 1, 2], [1, 2, 3], [7, 7, 7, 7])]
    counts, drafts = NgramProposer(NgramOptions()).propose(
        rows, np.array([2, 4, 1], np.int32), np.arange(3)
    )
    assert (counts.tolist(), drafts.tolist()) == ([2, 0, 1], [9, 1, 7])


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("ngram.max_drafts=16", "15"),
        ("ngram.max_drafts=0", "1"),
        ("ngram.min_match=5", "raise max_match"),
        ("ngram.matches=3", "ngram' has max_drafts, min_match, max_match"),
    ],
)
def test_options_that_make_no_sense_are_refused(text: str, wanted: str) -> None:
    spec = registry.load_spec("proposer", "ngram")
    with pytest.raises(UsageError, match=wanted):
        registry.make_options(spec, (text,))
    assert NgramProposer(NgramOptions(max_drafts=7)).max_drafts == 7


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (
            "One boat, two boats, one boat, two boats,",
            r"drafts: \d+ of \d+ drafts right \(\d+%\) in",
        ),
        ("12 + 30 =", "drafts: none"),
    ],
)
def test_run_prints_how_many_drafts_were_right(
    prompt: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--proposer", "ngram", "--num-pages", "64", "--temperature", "0", "--ignore-eos"]
    length = "60" if "," in prompt else "2"
    assert main(["run", *flags, "--prompt", prompt, "--max-tokens", length]) == 0
    assert re.search(said, capsys.readouterr().err)
