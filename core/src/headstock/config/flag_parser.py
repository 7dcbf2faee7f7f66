"""The parser of command lines, without the settings: verbs that take none start fast."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Collection, Sequence
from itertools import groupby
from typing import Any, NoReturn

from headstock.errors import NotSupported, UsageError, format_count, shorten, suggest_name

WORDS = "words"
"""Where a parsed namespace keeps what stands without a flag."""
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


class _ShowHelp(argparse.Action):
    """`--help` prints the common flags, `--help all` every one."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> NoReturn:
        assert isinstance(parser, FlagParser)
        sys.stdout.write(parser.format_help() if values else parser.format_common_help())
        parser.exit()


class FlagParser(argparse.ArgumentParser):
    """A parser that raises one-line UsageErrors, suggests flags, and takes no abbreviations.

    hint: says where a word without a flag may have belonged
    max_words: how many words without a flag there may be
    common: the flags that `--help` lists; the others are in `--help all`. Empty for all of them
    """

    def __init__(
        self,
        usage: str = "%(prog)s [options]",
        hint: str = "",
        *,
        max_words: int = 0,
        common: Collection[str] = (),
        **options: Any,
    ) -> None:
        self.hint = hint
        self.max_words = max_words
        self.common = frozenset(common)
        super().__init__(
            # An abbreviation would change its meaning with the next flag that begins alike.
            allow_abbrev=False,
            usage=usage,
            add_help=not common,
            **{"formatter_class": _FlagHelpFormatter, **options},
        )
        if common:
            self.add_argument(
                "-h",
                "--help",
                action=_ShowHelp,
                nargs="?",
                choices=["all"],
                metavar="all",
                help="show the common flags, or all of them, and exit",
            )

    def format_common_help(self) -> str:
        """The help with the common flags alone."""
        shown = {*self.common, "--help"}
        others = [
            action
            for action in self._actions
            if action.help != argparse.SUPPRESS and not shown.intersection(action.option_strings)
        ]
        texts = [action.help for action in others]
        for action in others:
            action.help = argparse.SUPPRESS
        epilog = self.epilog
        more = format_count(len(others), "more flag")
        self.epilog = f"'{self.prog} --help all' lists {more}, and what exit codes mean."
        try:
            return self.format_help()
        finally:
            self.epilog = epilog
            for action, text in zip(others, texts, strict=True):
                action.help = text

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see '{self.prog} --help'")

    # argparse declares overloads for the namespace's class, but only the plain one is used
    # here. Refusing what is left over in this method, not in parse_args, lets a sub-parser suggest
    # its own flags.
    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        parsed, rest = super().parse_known_args(args, namespace)
        unknown = [word for word in rest if word.startswith("-")] or rest[self.max_words :]
        if unknown:
            self.refuse(unknown[0].split("=")[0])
        if self.max_words:
            setattr(parsed, WORDS, rest)
        return parsed, []

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
