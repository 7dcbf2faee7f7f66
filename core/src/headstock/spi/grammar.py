"""Grammars: which tokens may come next in an answer that follows one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING

from attrs import frozen

from headstock.spi.arrays import Ints
from headstock.spi.plugin import PluginSpec

if TYPE_CHECKING:
    import numpy as np


class GrammarKind(Enum):
    """What a grammar is written as: a JSON schema, a regular expression, texts to choose
    from (a JSON list of strings), or a context-free grammar.

    JSON_OR_CALLS: a JSON object. Its `json` is the schema of an answer without calls. Any other
        answer is `begin`, one of `calls`, `end`, or several calls with `separator` between them, if
        that is not null. Each of these is a list of segments, in this order: `{"text": TEXT}`,
        `{"token": ID}` for that token alone, and `{"json": SCHEMA}`.
    TEXT_OR_CALLS: a JSON object of the same lists, without `json`. An answer is text, or calls with
        `mark`, a list of one segment or of none, before `begin`. With a mark, text may come before
        it. Text has none of the texts in the list `without`, and does not begin, after white
        space, with one of those in the list `not_first`. Blanks may follow a comma or colon
        between JSON values, one each.
    """

    JSON_SCHEMA = "json"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    JSON_OR_CALLS = "json_or_calls"
    TEXT_OR_CALLS = "text_or_calls"


@frozen(kw_only=True)
class Vocabulary:
    """The tokens of a model.

    tokenizer_file: the path of its tokenizer.json
    size: how many scores the model has, which may be more than the tokenizer has tokens
    end_ids: tokens that end a text
    """

    tokenizer_file: str
    size: int
    end_ids: tuple[int, ...]


@frozen(kw_only=True)
class GrammarSpec(PluginSpec):
    """A grammar engine as its entry point returns it; `implementation` names a `GrammarEngine`."""


class Matcher(ABC):
    """Follows one answer, token by token. One thread at a time uses it."""

    @abstractmethod
    def fill_mask(self, mask: Ints) -> bool:
        """Set the bits of the tokens that may come next, as in `Sampling.mask`; clear the others.

        Tokens that end the text need no bit: core sets those of the request where it may end.

        returns: whether the text may end here
        writes: mask [words] int32
        raises: ValueError when the text cannot be followed any further, because a limit is reached
        """

    @abstractmethod
    def advance(self, tokens: Ints) -> int:
        """Follow the tokens as far as they are allowed; return how many that are.

        tokens: [n] int32, without those that end the text
        raises: ValueError when they cannot be followed because a limit is reached
        """

    @abstractmethod
    def rollback(self, count: int) -> None:
        """Go back behind the last `count` tokens that were followed."""


class CompiledGrammar(ABC):
    """A grammar that any number of answers may follow."""

    @abstractmethod
    def start(self) -> Matcher:
        """Make the matcher of an answer, before its first token.

        raises: ValueError when that takes more than a limit allows
        """


class GrammarEngine(ABC):
    """Compiles grammars for one vocabulary.

    It is made with the vocabulary and an instance of the spec's options class, or with the
    vocabulary alone where the spec names none. Any thread may call it.

    raises: ValueError when the tokenizer does not suit it, with the next move
    """

    # A matcher never leaves the engine's process. So a grammar is first compiled in a process of
    # its own, where a crash or a hang costs that request alone, and then again here.
    @abstractmethod
    def compile(self, kind: GrammarKind, text: str) -> CompiledGrammar:
        """Compile a grammar.

        raises: ValueError with what is wrong or not supported, by name. A rule that is left out in
            silence would give answers that do not follow it
        """

    def fill_masks(
        self, matchers: Sequence[tuple[Matcher, Ints]], masks: np.ndarray
    ) -> list[tuple[bool, ...] | ValueError]:
        """Fill the masks of several answers, each with drafts of its next tokens.

        A matcher with k drafts has k + 1 masks: before the first draft and after each. Masks after
        a draft that is not allowed stay as they are: that draft is rejected whatever they say.
        Afterwards every matcher is where it was.

        matchers: each with its drafts, [k] int32
        returns: for each matcher, whether the text may end at each mask that was filled; or why it
            cannot be followed any further
        writes: masks [sum of k + 1, words] int32, matcher by matcher
        """
        results: list[tuple[bool, ...] | ValueError] = []
        at = 0
        for matcher, drafts in matchers:
            try:
                results.append(_fill_drafted(matcher, drafts, masks[at : at + len(drafts) + 1]))
            except ValueError as error:
                results.append(error)
            at += len(drafts) + 1
        return results


def _fill_drafted(matcher: Matcher, drafts: Ints, masks: np.ndarray) -> tuple[bool, ...]:
    """Fill the masks of one answer, as `GrammarEngine.fill_masks`.   raises: ValueError"""
    ends = [matcher.fill_mask(masks[0])]
    followed = 0
    try:
        for mask in masks[1:]:
            if not matcher.advance(drafts[followed : followed + 1]):
                break
            followed += 1
            ends.append(matcher.fill_mask(mask))
    finally:
        if followed:
            matcher.rollback(followed)
    return tuple(ends)
