"""Text from tokens as they come, never half a character."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from headstock.text.tokenizer import Tokenizer

REPLACEMENT: Final = "\ufffd"

CONTEXT: Final = 4
"""Tokens kept when the window is cut: an unfinished character has at most 3 bytes, so 3 tokens; and
one before it.
"""

WINDOW: Final = 16
"""Tokens at which the window is cut, so that a token costs the decoding of at most this many."""


class Detokenizer:
    """Gives the text of a growing row of tokens in pieces whose concatenation is the text of them
    all.

    What may still change is held back. Bytes: an unfinished character decodes to one U+FFFD at the
    very end, however many of its bytes are there, and nothing before it can change. Byte fallback:
    one bad byte spoils its whole run of byte tokens, so a run is decoded when it ends.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self.tokenizer = tokenizer
        self.skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self.window: list[int] = []
        self.given = 0  # characters of the window's text that are out

    def feed(self, tokens: Iterable[int]) -> str:
        """The text that `tokens` make certain."""
        tokens = tuple(tokens)
        if len(tokens) < 2 or not self.tokenizer.byte_ids.isdisjoint((*tokens, *self.window[-1:])):
            return "".join(self.feed_one(token) for token in tokens)
        fresh = [
            token for token in tokens if token not in self.skipped and self.tokenizer.known(token)
        ]
        return self.more(fresh) if fresh else ""

    def more(self, tokens: list[int]) -> str:
        """The text that `tokens`, none of them a byte, make certain.   writes: self"""
        self.window += tokens
        text = self.decode()
        held = int(text.endswith(REPLACEMENT))
        piece = text[self.given : len(text) - held]
        self.given = len(text) - held
        if len(self.window) >= WINDOW:
            self.window = self.window[-CONTEXT:]
            self.given = len(self.decode()) - held
        return piece

    def feed_one(self, token: int) -> str:
        """The text that `token` makes certain."""
        if token in self.skipped or not self.tokenizer.known(token):
            return ""
        if token in self.tokenizer.byte_ids:
            self.window.append(token)
            return ""
        return self.more([token])

    def finish(self) -> str:
        """The rest of the text, when no token follows."""
        text = self.decode()
        piece = text[self.given :]
        self.given = len(text)
        return piece

    def decode(self) -> str:
        """The text of the window."""
        return self.tokenizer.decode(self.window, skip_special_tokens=False)
