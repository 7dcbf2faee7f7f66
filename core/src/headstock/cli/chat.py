"""`headstock chat`: `headstock run`, with prompts as turns of a chat."""

from __future__ import annotations

from headstock.cli import run
from headstock.config.flag_parser import FlagParser


def main(arguments: list[str]) -> int:
    """Run `headstock chat ARGUMENTS` and return the exit code.

    raises: HeadstockError, KeyboardInterrupt
    """
    return run.answer(make_parser().parse_args(["--chat", *arguments]))


def make_parser() -> FlagParser:
    """The parser of `headstock chat`."""
    return run.make_parser("chat")
