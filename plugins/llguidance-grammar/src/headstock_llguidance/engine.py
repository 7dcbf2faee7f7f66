"""Grammars by llguidance: an Earley parser over a lexer of derivatives."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import any_to_lark

from headstock.spi import CompiledGrammar, GrammarEngine, GrammarKind, Matcher, Vocabulary
from headstock.spi.arrays import Ints
from headstock_llguidance.call_rules import CallRules
from headstock_llguidance.dates import hold_text_to_calendar
from headstock_llguidance.options import LLGuidanceOptions

_NO_TEXT = "no text follows it: a rule refers to itself alone, or nothing can match"
_FEW = 4
"""Number of masks up to which one thread is as fast as several."""


class LLMatcher(Matcher):
    """Follows one answer."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self.matcher = matcher
        self.check()

    def check(self) -> None:
        """Raise ValueError where the matcher has failed."""
        # A failed matcher allows the tokens that end a text, as if the answer were complete.
        if self.matcher.is_error():
            raise ValueError(_explain(self.matcher.get_error()))

    def fill_mask(self, mask: Ints) -> bool:
        """See `Matcher.fill_mask`."""
        self.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self.check()
        return bool(self.matcher.is_accepting())

    def advance(self, tokens: Ints) -> int:
        """See `Matcher.advance`."""
        count = int(self.matcher.try_consume_tokens(tokens.tolist()))
        if count < len(tokens):
            self.check()  # reaching a limit looks like a token that is not allowed
        return count

    def rollback(self, count: int) -> None:
        """See `Matcher.rollback`."""
        self.matcher.rollback(count)


class LLGrammar(CompiledGrammar):
    """A grammar, as a matcher before its first token."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self.matcher = matcher

    def start(self) -> LLMatcher:
        """See `CompiledGrammar.start`."""
        # A copy shares the states computed by the lexer; compiling again would start from scratch.
        return LLMatcher(self.matcher.deep_copy())


class LLGuidanceEngine(GrammarEngine):
    """Compiles grammars for the tokens of one tokenizer."""

    def __init__(self, vocabulary: Vocabulary, options: LLGuidanceOptions) -> None:
        self.options = options
        self.rules = CallRules(has_whitespace=options.whitespace)
        self.tokenizer = llguidance.LLTokenizer(
            vocabulary.tokenizer_file,
            n_vocab=vocabulary.size,
            eos_token=list(vocabulary.end_ids) or None,
        )
        # Reaching a limit fails one request. The defaults bound a mask to some tens of
        # milliseconds; errors quote neither schema nor text of a user.
        self.limits = llguidance.LLParserLimits(verbose_errors=False)
        self.executor = (
            None if options.threads == 1 else llguidance.LLExecutor(options.threads or None)
        )

    def compile(self, kind: GrammarKind, text: str) -> LLGrammar:
        """See `GrammarEngine.compile`."""
        grammar = self.write_grammar(kind, text)
        matcher = llguidance.LLMatcher(self.tokenizer, grammar, log_level=0, limits=self.limits)
        if matcher.is_error():
            raise ValueError(_explain(matcher.get_error()))
        # It warns about unsupported parts of a schema.
        if warnings := matcher.get_grammar_warnings():
            raise ValueError(_first_line("; ".join(warnings)))
        return LLGrammar(matcher)

    def write_grammar(self, kind: GrammarKind, text: str) -> str:
        """Write the grammar as llguidance reads it.   raises: ValueError"""
        match kind:
            case GrammarKind.JSON_SCHEMA:
                overrides: Any = {"whitespace_flexible": self.options.whitespace}
                # The options need an object; an empty one allows as much as true.
                schema = {"true": "{}", "false": '{"enum": []}'}.get(text, text)
                schema = hold_text_to_calendar(schema)
                return llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=overrides)
            case GrammarKind.REGEX:
                return llguidance.LLMatcher.grammar_from_regex(text)
            case GrammarKind.CHOICE:
                texts = (json.dumps(choice, ensure_ascii=False) for choice in json.loads(text))
                return llguidance.LLMatcher.grammar_from_lark(f"start: {' | '.join(texts)}")
            case GrammarKind.GRAMMAR:
                return llguidance.LLMatcher.grammar_from_lark(_write_lark(text))
            case GrammarKind.JSON_OR_CALLS:
                lark = self.rules.write_json_or_calls(json.loads(text))
                return llguidance.LLMatcher.grammar_from_lark(lark)
            case GrammarKind.TEXT_OR_CALLS:
                lark = self.rules.write_text_or_calls(json.loads(text))
                return llguidance.LLMatcher.grammar_from_lark(lark)
        raise ValueError(f"grammars of the kind {kind.value!r} are not supported")

    def fill_masks(
        self, matchers: Sequence[tuple[Matcher, Ints]], masks: np.ndarray
    ) -> list[tuple[bool, ...] | ValueError]:
        """See `GrammarEngine.fill_masks`; many answers without drafts by several threads."""
        if len(masks) > len(matchers):
            return super().fill_masks(matchers, masks)
        found = [each.matcher for each, _ in matchers if isinstance(each, LLMatcher)]
        # Pointers, because a view of each row in numpy costs as much as filling it.
        start, size = masks.ctypes.data, masks.shape[1] * masks.itemsize
        if self.executor is None or len(masks) <= _FEW:
            for at, matcher in enumerate(found):
                matcher.unsafe_compute_mask_ptr(start + at * size, size)
        else:
            self.executor.unsafe_compute_mask_ptr(
                [(matcher, at) for at, matcher in enumerate(found)], start, size, len(masks)
            )
        return [
            ValueError(_explain(matcher.get_error()))
            if matcher.is_error()
            else (bool(matcher.is_accepting()),)
            for matcher in found
        ]


def _write_lark(text: str) -> str:
    """Convert a grammar to Lark.   raises: ValueError for invalid GBNF"""
    try:
        return any_to_lark(text)
    except Exception as error:  # of exactly this type, or of one that is not a ValueError
        reason, *_ = str(error).split(", '")  # a quotation of the grammar follows
        raise ValueError(f"GBNF: {reason}") from error


def _explain(text: str) -> str:
    """Explain an error of a matcher in a line."""
    line = _first_line(text)
    return _NO_TEXT if line == "NoExtensionBias" else line


def _first_line(text: str) -> str:
    """The first line of a message, which the others explain."""
    return text.strip().splitlines()[0] if text.strip() else "llguidance gives no reason"
