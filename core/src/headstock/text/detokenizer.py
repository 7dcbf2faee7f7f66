"""Text from tokens as they come, never half a character."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice, takewhile
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
    all. Special tokens may be left out, except those in `shown_ids`.

    Behind a `prompt` it is what the tokens add to the prompt's text: the text of the prompt's
    tokens and of these, after the text of the prompt's tokens.

    window: the last tokens, at first those of the prompt that decide how the text begins
    num_replaced: characters at the end of the prompt's text in whose place the text comes, once
        it has begun: those of an unfinished character that it completes
    """

    # A token alone has no text: it may hold a part of a character, and a decoder may drop the first
    # space of what it gets. So a window of the last tokens is decoded again for every token, and
    # the new part of its text goes out. The part that may still change is held back:
    #   - Byte-level vocabularies: an unfinished character decodes to one U+FFFD at the very end,
    #     however many of its bytes are there, and nothing before it can change.
    #   - Byte fallback: one bad byte turns its whole run of byte tokens into U+FFFD, so a run is
    #     decoded when the first token that is not a byte ends it.
    # So the window begins with the prompt's last tokens: CONTEXT of them, and all of a run of bytes
    # at its end.

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        shown_ids: frozenset[int] = frozenset(),
        prompt: Sequence[int] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.skipped_ids = tokenizer.special_ids - shown_ids if skip_special_tokens else frozenset()
        self.window = self._list_context(prompt)
        # Of the window's tokens, until the first text goes out.
        self.prompt_text = self._decode_window() if self.window else ""
        self.num_emitted = len(self.prompt_text)  # characters of the window's text
        self.num_pending = 0  # characters at its end that may change
        self.num_replaced = 0

    def _list_context(self, prompt: Sequence[int]) -> list[int]:
        """The tokens at the prompt's end that decide how the text behind it begins."""
        if not self.tokenizer.vocab_size:
            return []
        context: list[int] = []
        is_in_run = True
        for token in reversed(prompt):
            if token in self.skipped_ids or not self.tokenizer.has_token(token):
                continue
            context.append(token)
            is_in_run = is_in_run and token in self.tokenizer.byte_ids
            if len(context) >= CONTEXT and not is_in_run:
                break
        return context[::-1]

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
        """The text that is final because the window's last token is not a byte."""
        text = self._decode_window()
        self.num_pending = int(text.endswith(REPLACEMENT))
        piece = self._emit(text, len(text) - self.num_pending)
        if len(self.window) >= WINDOW:
            known = filter(self.tokenizer.has_token, reversed(self.window))
            self.window = [*islice(known, CONTEXT)][::-1]
            # Decoded anew: the shorter window may begin within a character, or without its space.
            self.num_emitted = len(self._decode_window()) - self.num_pending
            self.prompt_text = ""
        return piece

    def _emit(self, text: str, end: int) -> str:
        """The characters of the window's `text` before `end` that did not go out yet."""
        if self.prompt_text:
            start = _count_common(self.prompt_text, text)
            if end <= start:
                return ""
            self.num_replaced = len(self.prompt_text) - start
            self.prompt_text = ""
        else:
            start = self.num_emitted
        self.num_emitted = end
        return text[start:end]

    def add_last_tokens(self, tokens: Iterable[int]) -> str:
        """The rest of the text, with that of `tokens`, when no token follows them."""
        # One decoding instead of three: no window is kept, and what was held back comes with it.
        self.window += [token for token in tokens if token not in self.skipped_ids]
        return self.flush()

    def flush(self) -> str:
        """The rest of the text, when no token follows."""
        text = self._decode_window()
        return self._emit(text, len(text))

    def peek(self) -> str:
        """The rest of the text, if no token followed."""
        text = self._decode_window()
        return text[
            _count_common(self.prompt_text, text) if self.prompt_text else self.num_emitted :
        ]

    def list_additions(self, tokens: Iterable[int]) -> list[str]:
        """What each of `tokens` would add to the text, if it came next: nothing for a part of a
        character. Of a special token that is left out, its own text.
        """
        # As many tokens as must stay behind what is certain, or a whole run of bytes.
        is_in_run = bool(self.window) and self.window[-1] in self.tokenizer.byte_ids
        context = self.window if is_in_run else self.window[-CONTEXT:]
        before = self.tokenizer.decode(context, skip_special_tokens=False)
        return [self._read_addition(token, context, before) for token in tokens]

    def _read_addition(self, token: int, context: list[int], before: str) -> str:
        if token in self.skipped_ids:
            return self.tokenizer.decode([token], skip_special_tokens=False)
        text = self.tokenizer.decode([*context, token], skip_special_tokens=False)
        if text.endswith(REPLACEMENT):
            if token in self.tokenizer.byte_ids:
                return ""
            text = text[:-1]
        return text[_count_common(before, text) :]

    def _decode_window(self) -> str:
        return self.tokenizer.decode(self.window, skip_special_tokens=False)


def _count_common(before: str, text: str) -> int:
    """The characters with which both begin."""
    if text.startswith(before):  # as nearly always
        return len(before)
    return sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, text, strict=False))
    )
