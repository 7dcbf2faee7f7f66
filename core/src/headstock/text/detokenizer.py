"""Text from tokens as they come, never half a character."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Final

from headstock.text.tokenizer import Tokenizer

REPLACEMENT: Final = "\ufffd"

CONTEXT: Final = 4
"""Tokens that stay when the window is cut: an unfinished character has at most 3 bytes, so 3
tokens, and one before it.
"""

WINDOW: Final = 16
"""Tokens at which the window is cut, so that a token costs the decoding of at most this many."""


class Detokenizer:
    """Gives the text of a growing row of tokens in pieces, whose concatenation is the text of them
    all. Special tokens may be left out, but for those in `shown_ids`.
    """

    # A token alone has no text: it may hold a part of a character, and a decoder may drop the first
    # space of what it gets. So a window of the last tokens is decoded again for every token, and
    # the new part of its text goes out. The part that may still change is held back:
    #   - Byte-level vocabularies: an unfinished character decodes to one U+FFFD at the very end,
    #     however many of its bytes are there, and nothing before it can change.
    #   - Byte fallback: one bad byte turns its whole run of byte tokens into U+FFFD, so a run is
    #     decoded when the first token that is no byte ends it.

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.tokenizer = tokenizer
        self.skipped_ids = tokenizer.special_ids - shown_ids if skip_special_tokens else frozenset()
        self.window: list[int] = []
        self.num_emitted = 0  # characters of the window's text

    def add_tokens(self, tokens: Iterable[int]) -> str:
        """The text that `tokens` make certain."""
        tokens = tuple(tokens)
        if len(tokens) == 1:  # as in most steps
            return self.add_token(tokens[0])
        # Where no run of bytes is open or begins, all tokens may be decoded at once.
        if not self.tokenizer.byte_ids.isdisjoint((*tokens, *self.window[-1:])):
            return "".join(self.add_token(token) for token in tokens)
        visible = [token for token in tokens if token not in self.skipped_ids]
        # Unknown ids have no text, but would pass for context in the window. Behind many tokens the
        # window is cut, and only those that stay are looked up.
        if len(visible) < WINDOW:
            visible = list(filter(self.tokenizer.has_token, visible))
        self.window += visible
        return self._read_window() if visible else ""

    def add_token(self, token: int) -> str:
        """The text that `token` makes certain."""
        if token in self.skipped_ids or not self.tokenizer.has_token(token):
            return ""
        self.window.append(token)
        return "" if token in self.tokenizer.byte_ids else self._read_window()

    def _read_window(self) -> str:
        """The text that the window, whose last token is no byte, makes certain."""
        text = self._decode_window()
        num_pending = int(text.endswith(REPLACEMENT))
        piece = text[self.num_emitted : len(text) - num_pending]
        self.num_emitted = len(text) - num_pending
        if len(self.window) >= WINDOW:
            known = filter(self.tokenizer.has_token, reversed(self.window))
            self.window = [*islice(known, CONTEXT)][::-1]
            # Decoded anew: the shorter window may begin within a character, or without its space.
            self.num_emitted = len(self._decode_window()) - num_pending
        return piece

    def add_last_tokens(self, tokens: Iterable[int]) -> str:
        """The rest of the text, with that of `tokens`, when no token follows them."""
        # One decoding in place of three: no window is kept, and what was held back comes with it.
        self.window += [token for token in tokens if token not in self.skipped_ids]
        return self.flush()

    def flush(self) -> str:
        """The rest of the text, when no token follows."""
        text = self._decode_window()
        piece = text[self.num_emitted :]
        self.num_emitted = len(text)
        return piece

    def _decode_window(self) -> str:
        return self.tokenizer.decode(self.window, skip_special_tokens=False)
