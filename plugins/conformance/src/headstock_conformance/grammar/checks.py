"""The cases of a grammar engine: masks, advances, rollbacks, and refused texts."""

from __future__ import annotations

import json
import random
import re
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen

from headstock import registry
from headstock.errors import CannotRun
from headstock.spi import DeviceEnv, GrammarEngine, GrammarKind, GrammarSpec, Matcher
from headstock.spi.arrays import Ints
from headstock_conformance.case import Case
from headstock_conformance.grammar.vocabulary import (
    END,
    SIZE,
    TOKENS,
    decode_tokens,
    encode_bytes,
    write_tokenizer,
)

WORDS = -(-SIZE // 32)
LONGEST = 200
"""Tokens of a drawn answer; after some, it ends where it may."""
SCHEMA = {
    "type": "object",
    "properties": {"ab": {"enum": [12, "nul", None]}, "b": {"type": "boolean"}},
    "required": ["ab", "b"],
    "additionalProperties": False,
}
UNIQUE = {
    "type": "array",
    "items": {"enum": [1, 2]},
    "uniqueItems": True,
    "minItems": 2,
    "maxItems": 2,
}


def is_of_schema(text: str) -> bool:
    """Whether the text is of `SCHEMA`."""
    value = json.loads(text)
    return (
        isinstance(value, dict)
        and set(value) == {"ab", "b"}
        and value["ab"] in (12, "nul", None)
        and isinstance(value["b"], bool)
    )


@frozen
class ExampleGrammar:
    """A grammar and some answers.

    right, wrong: answers that follow it or do not, whatever the engine's options
    contains: whether a text is an answer
    """

    kind: GrammarKind
    text: str
    right: Sequence[str]
    wrong: Sequence[str]
    contains: Callable[[str], bool]


CALLS: dict[str, Any] = {
    "json": {"type": "integer"},
    "calls": [
        [{"text": "a"}, {"json": {"const": 12}}],
        [{"text": "b"}],
    ],
    "begin": [{"text": "<"}],
    "end": [{"text": ">"}],
    "separator": [{"text": ">,<"}],
}
TEXT_CALLS: dict[str, Any] = {
    **{name: value for name, value in CALLS.items() if name != "json"},
    "mark": [{"text": "<"}],
    "begin": [],
    "without": ["<", "{}"],
    "not_first": ["1"],
}
TEXT = r"(?![ \t\r\n]*1)(?!.*\{\})[^<]*"
CHOICES = ("no", "nope", "tru", 'a "b"\n', "天")
EXAMPLES = {
    "a JSON schema": ExampleGrammar(
        GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA), (), ("[", '{"c', "12"), is_of_schema
    ),
    "a regular expression": ExampleGrammar(
        GrammarKind.REGEX,
        "[a-c]{2,4}12?",
        ("ab1", "abcc12", "aa12"),
        ("a1", "abcab", "ab2", "ab122"),
        lambda text: bool(re.fullmatch("[a-c]{2,4}12?", text)),
    ),
    "a choice": ExampleGrammar(
        GrammarKind.CHOICE,
        json.dumps(CHOICES),
        CHOICES,
        ("n", "nop", "true", ""),
        lambda text: text in CHOICES,
    ),
    "a grammar": ExampleGrammar(
        GrammarKind.GRAMMAR,
        'root ::= "(" root ")" | "x"',
        ("x", "(x)", "(((x)))"),
        ("", "(", "(x", "x)"),
        lambda text: bool(re.fullmatch(r"\(*x\)*", text)) and text.count("(") == text.count(")"),
    ),
    "JSON or calls": ExampleGrammar(
        GrammarKind.JSON_OR_CALLS,
        json.dumps(CALLS),
        ("<a12>", "<b>", "<a12>,<b>"),
        ("", "<a>", "<b12>", "<b>,", "<b><b>", "[2]"),
        lambda text: bool(re.fullmatch(r"<(a12|b)>(,<(a12|b)>)*|-?[0-9]+", text)),
    ),
    "text or calls": ExampleGrammar(
        GrammarKind.TEXT_OR_CALLS,
        json.dumps(TEXT_CALLS),
        ("", "a12", "{ 1}", "<a12>", "b\n<b>", "<a12>,<b>"),
        ("<", "<a>", "12", " 1", "{}", "{}<b>", " 1<b>", "<b>a", "<b><b>"),
        lambda text: bool(re.fullmatch(rf"(?s:{TEXT}(<(a12|b)>(,<(a12|b)>)*)?)", text)),
    ),
}
REFUSED = {
    GrammarKind.JSON_SCHEMA: ('{"type": "no type"}', '{"type": '),
    GrammarKind.REGEX: ("(a", "[b-a]"),
    GrammarKind.CHOICE: ('["a", ',),
    GrammarKind.GRAMMAR: ('root ::= ("x"', 'root ::= other "x"'),
    GrammarKind.JSON_OR_CALLS: (json.dumps(CALLS | {"json": {"type": "no type"}}), "{"),
    GrammarKind.TEXT_OR_CALLS: (
        json.dumps(TEXT_CALLS | {"calls": [[{"json": {"type": "no type"}}]]}),
        "{",
    ),
}


def list_cases(spec: GrammarSpec, env: DeviceEnv, *, opt: Sequence[str] = ()) -> tuple[Case, ...]:
    """All cases of an engine; independent of the machine. Kinds that it refuses are not run."""
    checks: dict[str, Callable[[GrammarEngine, ExampleGrammar], object]] = {
        "a mask allows what `advance` does": check_masks,
        "answers of the grammar and others": check_answers,
        "answers drawn by masks": check_drawn,
        "the way back": check_rollback,
        "two answers of one grammar": check_two,
        "masks of drafts": check_drafts,
    }
    cases = [
        Case(f"{title}: {name}", partial(run_example, spec, opt, example, run))
        for title, example in EXAMPLES.items()
        for name, run in checks.items()
    ]
    return (
        *cases,
        Case("texts that are not a grammar", partial(run_with, spec, opt, check_refused)),
        Case("a schema's rules, or a refusal", partial(run_with, spec, opt, check_rules)),
    )


def run_with(spec: GrammarSpec, opt: Sequence[str], run: Callable[[GrammarEngine], object]) -> None:
    """Make the engine as headstock does, and run a case.   raises: PluginBroken, ValueError"""
    options = () if spec.options is None else (registry.make_options(spec, opt),)
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = write_tokenizer(Path(folder))
        run(registry.make_part(spec, GrammarEngine, vocabulary, *options))


def run_example(
    spec: GrammarSpec,
    opt: Sequence[str],
    example: ExampleGrammar,
    run: Callable[[GrammarEngine, ExampleGrammar], object],
) -> None:
    """Run a case with an example.   raises: CannotRun when the engine refuses its kind"""

    def run_here(engine: GrammarEngine) -> None:
        reason = find_refusal(engine, example.kind, example.text)
        if reason is not None:
            raise CannotRun(f"it refuses {example.kind.value!r}: {reason}")
        run(engine, example)

    run_with(spec, opt, run_here)


def fill(matcher: Matcher) -> tuple[set[int], bool]:
    """The tokens that may come next, and whether the text may end."""
    masks = np.array([[-1] * WORDS, [0] * WORDS], np.int32)
    ends = [matcher.fill_mask(mask) for mask in masks]
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")[:, :SIZE]
    bits[:, END] = 0
    assert (bits[0] == bits[1]).all(), "fill_mask leaves bits of the mask as they were"
    assert ends[0] == ends[1] and isinstance(ends[0], bool), (
        f"fill_mask: expected the same bool twice, got {ends[0]!r} and then {ends[1]!r}"
    )
    allowed = set(bits[0].nonzero()[0].tolist())
    assert max(allowed, default=0) < len(TOKENS), "a mask allows an id that is not a token"
    return allowed, ends[0]


def advance(matcher: Matcher, tokens: Sequence[int]) -> int:
    """Follow tokens and return how many are allowed."""
    array = np.array(tokens, np.int32)
    array.setflags(write=False)
    return matcher.advance(array)


def start_at(engine: GrammarEngine, example: ExampleGrammar, tokens: Sequence[int]) -> Matcher:
    """A new matcher after these tokens, which are allowed."""
    matcher = engine.compile(example.kind, example.text).start()
    count = advance(matcher, tokens)
    assert count == len(tokens), (
        f"{decode_tokens(list(tokens))!r} is followed for {count} of {len(tokens)} tokens"
    )
    return matcher


def draw(matcher: Matcher, seed: int) -> list[int]:
    """Draw an answer by masks, with tokens of one byte and longer ones."""
    chance = random.Random(seed)
    tokens: list[int] = []
    while True:
        allowed, may_end = fill(matcher)
        if may_end and (len(tokens) > LONGEST // 10 or chance.random() < 0.3 or not allowed):
            return tokens
        assert allowed, (
            f"after {decode_tokens(tokens)!r} nothing is allowed, and the text may not end"
        )
        assert len(tokens) < LONGEST, "an answer that is drawn does not end"
        tokens.append(chance.choice(sorted(allowed)))
        assert advance(matcher, tokens[-1:]) == 1, (
            f"a mask allows {TOKENS[tokens[-1]]!r}, and advance does not"
        )


def check_masks(engine: GrammarEngine, example: ExampleGrammar) -> None:
    """Tokens sampled by the mask must be accepted, and no continuation may be blocked."""
    tokens = draw(start_at(engine, example, []), seed=1)
    for length in range(min(len(tokens), 6) + 1):
        matcher = start_at(engine, example, tokens[:length])
        allowed, _ = fill(matcher)
        followed = set()
        for token in range(1, len(TOKENS)):
            if advance(matcher, [token]):
                followed.add(token)
                matcher.rollback(1)
        place = f"after {decode_tokens(tokens[:length])!r}"
        wrong = sorted(TOKENS[token] for token in allowed - followed)
        assert not wrong, f"{place} the mask allows {wrong[:3]}, and advance does not follow"
        # Of tokens that spell the same text, a mask may allow only one.
        closed = {TOKENS[token][0] for token in followed} - {TOKENS[token][0] for token in allowed}
        assert not closed, (
            f"{place} advance follows text that begins with {sorted(closed)[:3]}, and the mask "
            "does not allow it"
        )


def check_answers(engine: GrammarEngine, example: ExampleGrammar) -> None:
    """Every answer of the grammar can be given, and no other one."""
    for text in example.right:
        matcher = start_at(engine, example, encode_bytes(text))
        assert fill(matcher)[1], f"{text!r} may not end there"
    for text in example.wrong:
        matcher, tokens = start_at(engine, example, []), encode_bytes(text)
        if advance(matcher, tokens) == len(tokens):
            assert not fill(matcher)[1], f"{text!r} does not match the grammar, but is allowed"


def check_drawn(engine: GrammarEngine, example: ExampleGrammar) -> None:
    """Texts that masks allow follow the grammar, however they are split into tokens."""
    for seed in range(8):
        tokens = draw(start_at(engine, example, []), seed)
        text = decode_tokens(tokens)
        assert example.contains(text), f"masks allow {text!r}, which is not of {example.text}"


def check_rollback(engine: GrammarEngine, example: ExampleGrammar) -> None:
    """Rejected drafts are rolled back, as if they had never been advanced over."""
    tokens = draw(start_at(engine, example, []), seed=2)
    expected = [
        fill(start_at(engine, example, tokens[:length])) for length in range(len(tokens) + 1)
    ]
    matcher = start_at(engine, example, tokens)
    for count in range(1, len(tokens) + 1):
        length_left = len(tokens) - count
        matcher.rollback(count)
        assert fill(matcher) == expected[length_left], f"rollback({count}) leaves a different mask"
        assert advance(matcher, tokens[length_left:]) == count, (
            f"tokens undone by rollback({count}) are not followed again"
        )


def check_two(engine: GrammarEngine, example: ExampleGrammar) -> None:
    """Any number of answers may share one grammar."""
    grammar = engine.compile(example.kind, example.text)
    first, second = grammar.start(), grammar.start()
    expected = fill(second)
    tokens = draw(first, seed=3)
    assert fill(second) == expected, "two matchers of one grammar disturb each other"
    assert advance(second, tokens) == len(tokens), "two matchers of one grammar differ"


def check_drafts(engine: GrammarEngine, example: ExampleGrammar) -> None:
    """Masks of several answers with drafts equal those of each alone."""
    # The answer of some seeds is empty.
    drawn = (draw(start_at(engine, example, []), seed=seed) for seed in range(4, 99))
    tokens = next(filter(None, drawn))
    forbidden = min(set(range(1, len(TOKENS))) - fill(start_at(engine, example, []))[0])
    drafts: list[list[int]] = [[], tokens[:2], [forbidden], [tokens[0], *[forbidden] * 2], []]
    matchers = [start_at(engine, example, []) for _ in drafts]
    pairs: list[tuple[Matcher, Ints]] = [
        (matcher, np.array(each, np.int32)) for matcher, each in zip(matchers, drafts, strict=True)
    ]
    masks = np.full((sum(len(each) + 1 for each in drafts), WORDS), -1, np.int32)
    answers = engine.fill_masks(pairs, masks)
    first = 0
    for matcher, each, ends in zip(matchers, drafts, answers, strict=True):
        assert isinstance(ends, tuple), f"fill_masks returns {ends!r} for an answer of the grammar"
        for length, may_end in enumerate(ends):
            behind = start_at(engine, example, each[:length])
            mask = np.zeros(WORDS, np.int32)
            assert behind.fill_mask(mask) == may_end, (
                "fill_masks disagrees about the end of the text"
            )
            assert (mask == masks[first + length]).all(), "fill_masks fills other masks"
        assert fill(matcher) == fill(start_at(engine, example, [])), "fill_masks moves a matcher on"
        first += len(each) + 1


def check_refused(engine: GrammarEngine) -> None:
    """A request with such a grammar gets the reason."""
    for kind, texts in REFUSED.items():
        for text in texts:
            reason = find_refusal(engine, kind, text)
            assert reason is not None, f"compile accepts {text!r}, which is not valid {kind.value}"
            assert reason, f"compile gives no reason why {text!r} is not valid {kind.value}"


def find_refusal(engine: GrammarEngine, kind: GrammarKind, text: str) -> str | None:
    """Why the engine refuses a grammar; None if it accepts it."""
    try:
        engine.compile(kind, text).start()
    except ValueError as error:
        return str(error)
    return None


def check_rules(engine: GrammarEngine) -> None:
    """A silently ignored rule gives answers of another grammar."""
    example = ExampleGrammar(GrammarKind.JSON_SCHEMA, json.dumps(UNIQUE), (), (), lambda text: True)
    if find_refusal(engine, example.kind, example.text) is not None:
        return
    for seed in range(8):
        text = decode_tokens(draw(start_at(engine, example, []), seed))
        assert sorted(json.loads(text)) == [1, 2], (
            f"compile accepts the rule 'uniqueItems', and masks allow {text!r}"
        )
