"""A grammar that begins after the reasoning which some models write before their answer."""

from __future__ import annotations

from collections.abc import Sequence

from headstock.spi import Matcher
from headstock.spi.arrays import Ints
from headstock.structured_outputs import ReasoningTokens


class DelayedMatcher(Matcher):
    """Lets any text pass until reasoning ends, and follows `matcher` from there.

    Reasoning may begin with the first token, or has begun; it ends with its last token alone, and
    an answer may not end within it.
    """

    def __init__(
        self, matcher: Matcher, reasoning: ReasoningTokens, end_ids: Sequence[int]
    ) -> None:
        self.matcher = matcher
        self.reasoning = reasoning
        self.end_ids = list(end_ids)
        self.tokens: list[int] = []
        """The tokens that were followed, up to the one that ends reasoning."""
        self.num_answered = 0
        """The tokens that `matcher` has followed."""

    @property
    def has_begun(self) -> bool:
        """Whether the next token is one of the grammar."""
        return bool(self.num_answered) or self.tokens[-1:] == [self.reasoning.end]

    @property
    def may_reason(self) -> bool:
        """Whether the next token may begin the reasoning, or else the grammar."""
        return self.reasoning.start is not None and not self.tokens and not self.num_answered

    def fill_mask(self, mask: Ints) -> bool:
        """As the grammar says after reasoning; within it every token but those that end a text or
        that reasoning may not have.
        """
        if self.has_begun or self.may_reason:
            may_end = self.matcher.fill_mask(mask)
            if self.may_reason and self.reasoning.start is not None:
                _set_bit(mask, self.reasoning.start)
            return may_end
        mask[:] = -1
        for token in (*self.end_ids, *self.reasoning.without):
            _clear_bit(mask, token)
        return False

    def advance(self, tokens: Ints) -> int:
        """Follow the tokens as far as they are allowed."""
        for count, token in enumerate(tokens.tolist()):
            is_ruled = self.has_begun or (self.may_reason and token != self.reasoning.start)
            if not is_ruled:
                if token in self.reasoning.without:
                    return count
                self.tokens.append(token)
            elif self.matcher.advance(tokens[count : count + 1]):
                self.num_answered += 1
            else:
                return count
        return len(tokens)

    def rollback(self, count: int) -> None:
        """Go back behind the last `count` tokens."""
        answered = min(count, self.num_answered)
        if answered:
            self.matcher.rollback(answered)
            self.num_answered -= answered
        if count > answered:
            del self.tokens[answered - count :]


def _set_bit(mask: Ints, token: int) -> None:
    mask.view("uint32")[token // 32] |= 1 << (token % 32)


def _clear_bit(mask: Ints, token: int) -> None:
    mask.view("uint32")[token // 32] &= 0xFFFFFFFF ^ (1 << (token % 32))
