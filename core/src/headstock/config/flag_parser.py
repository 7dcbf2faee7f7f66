"""The parser of command lines, without the settings: verbs that take none start fast."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NoReturn

from headstock.errors import NotSupported, UsageError, shorten, suggest_name

MODEL_FLAG = "--model"
"""The flag of every verb that takes the engine's."""


class _FlagHelpFormatter(argparse.HelpFormatter):
    """Breaks lines only between words, so that a flag can be searched for.

    Indented lines of an epilog stay as they are.
    """

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines: list[str] = []
        for is_kept, group in groupby(
            text.strip().splitlines(), key=lambda line: not line or line.startswith(" ")
        ):
            block = list(group)
            lines += (
                block if is_kept else textwrap.wrap(" ".join(block), width, break_on_hyphens=False)
            )
        return "\n".join(indent + line if line else line for line in lines)


class FlagParser(argparse.ArgumentParser):
    """A parser that raises one-line UsageErrors, suggests flags, and takes no abbreviations.

    `hint` says where a word without a flag may have belonged.
    """

    def __init__(self, usage: str = "%(prog)s [options]", hint: str = "", **options: Any) -> None:
        self.hint = hint
        super().__init__(
            # An abbreviation would change its meaning with the next flag that begins alike.
            allow_abbrev=False,
            usage=usage,
            **{"formatter_class": _FlagHelpFormatter, **options},
        )

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see '{self.prog} --help'")

    # argparse declares overloads for the namespace's class, of which only the plain one is used
    # here. Refusing what is left over in this method, not in parse_args, lets a sub-parser suggest
    # its own flags.
    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        parsed, rest = super().parse_known_args(args, namespace)
        if rest:
            self.refuse(rest[0].split("=")[0])
        return parsed, rest

    def refuse(self, word: str) -> NoReturn:
        """Raise UsageError for an argument that nothing takes."""
        if not word.startswith("-"):
            self.error(f"unexpected argument {shorten(word)}{self.hint}")
        flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        equivalent = None
        # The sentence of an equivalent names flags of the engine, which not every verb takes.
        if MODEL_FLAG in flags:
            from headstock.config.equivalents import find_equivalent  # late: with every setting

            equivalent = find_equivalent(word)
        close = (
            f"; {equivalent}"
            if equivalent
            else suggest_name(word, flags, prefix="--") or f"; see '{self.prog} --help'"
        )
        kind = NotSupported if equivalent else UsageError
        raise kind(f"unknown flag {shorten(word)}{close}")
