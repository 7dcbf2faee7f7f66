"""The words that error texts are made of."""

from __future__ import annotations

import pytest

from headstock.config import (
    FlagParser,
    add_engine_flags,
    add_sampling_flags,
    make_engine_config,
)
from headstock.errors import UsageError, find_nearest_name, format_count, join_reasons


def test_one_thing_is_singular() -> None:
    assert [format_count(count, "token") for count in (0, 1, 2)] == [
        "0 tokens",
        "1 token",
        "2 tokens",
    ]


def test_reasons_are_joined_without_doubled_punctuation() -> None:
    assert join_reasons(["It cannot. Use x.", "y lacks z."]) == "It cannot. Use x; y lacks z"


@pytest.mark.parametrize(
    ("flag", "near"),
    [
        ("--temp", "--temperature"),
        ("--max-token", "--max-tokens"),
        ("--overlpa", "--overlap"),
        ("--Attn", "--attn"),
        ("--memory-ration", "--memory-ratio"),
        ("--bogus", None),
        ("--xp", None),
        ("--eager-enforced", None),
        ("--parallel", None),
    ],
)
def test_only_near_flags_are_suggested(flag: str, near: str | None) -> None:
    parser = FlagParser(prog="headstock run")
    add_engine_flags(parser)
    add_sampling_flags(parser)
    hint = "; see 'headstock run --help'" if near is None else f"; did you mean {near}?"
    with pytest.raises(UsageError, match=r"unknown flag") as raised:
        parser.parse_args([flag])
    assert str(raised.value) == f"unknown flag {flag}{hint}"


def test_only_near_keywords_are_suggested() -> None:
    with pytest.raises(UsageError, match=r"did you mean max_seq_len\?"):
        make_engine_config(max_seq_length=5)
    with pytest.raises(UsageError, match=r"unknown setting 'quantisation_x'$"):
        make_engine_config(quantisation_x="awq")
    assert find_nearest_name("rnu", ["run", "bench"]) == "run"
    assert find_nearest_name("temp", ["tp", "tmp"]) == "tmp"
