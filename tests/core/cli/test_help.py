"""`--help` in its short form and in its long one."""

from __future__ import annotations

import re

import pytest

from headstock.cli.main import main


def list_flags(capsys: pytest.CaptureFixture[str], *arguments: str) -> set[str]:
    assert main([*arguments]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    return set(re.findall(r"^  (?:-\w [^-\n]*, )?(--[a-z-]+)", shown.out, re.MULTILINE))


@pytest.mark.parametrize("verb", ["run", "chat", "serve"])
def test_help_lists_twenty_flags_and_with_all_every_one(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    short = list_flags(capsys, verb, "--help")
    whole = list_flags(capsys, verb, "--help", "all")
    assert {"--model", "--help", "--quant", "--attn"} < short < whole
    assert 15 <= len(short) <= 25 and len(whole) > 60
    assert list_flags(capsys, verb, "-h", "--prompt") == short if verb != "serve" else True


def test_the_short_help_leaves_the_long_one_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    from headstock.cli.run import make_parser

    parser = make_parser()
    before = parser.format_help()
    assert "more flags" in parser.format_common_help()
    assert parser.format_help() == before and "exit codes:" in before
