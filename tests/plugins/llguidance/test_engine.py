"""Grammars by llguidance: what they allow, what is refused by name, and what bombs cost."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import llguidance
import numpy as np
import pytest
from tokenizers import Tokenizer

import headstock_demo
from headstock.grammar.trial_process import try_grammar
from headstock.spi import GrammarKind, Matcher, Tool, Vocabulary
from headstock.text.forced_call import make_call_schema
from headstock_llguidance.engine import LLGuidanceEngine
from headstock_llguidance.options import LLGuidanceOptions

FILE = Path(headstock_demo.__file__).parent / "checkpoint" / "tokenizer.json"
TOKENIZER = Tokenizer.from_file(str(FILE))
SIZE, END = TOKENIZER.get_vocab_size() + 30, 0
WORDS = -(-SIZE // 32)


@pytest.fixture(scope="module")
def engine() -> LLGuidanceEngine:
    return make_engine()


def make_engine(**options: object) -> LLGuidanceEngine:
    """An engine for the demo's tokens, of which the model has more scores than the tokenizer."""
    vocabulary = Vocabulary(tokenizer_file=str(FILE), size=SIZE, end_ids=(END,))
    return LLGuidanceEngine(vocabulary, LLGuidanceOptions(**options))  # type: ignore[arg-type]


def allowed(matcher: Matcher) -> tuple[set[int], bool]:
    """The tokens that may come next, and whether the text may end."""
    mask = np.full(WORDS, -1, np.int32)
    may_end = matcher.fill_mask(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return set(bits.nonzero()[0].tolist()) - {END}, may_end


def accepts(engine: LLGuidanceEngine, kind: GrammarKind, text: str, answer: str) -> bool:
    """Whether the answer may be given, token by token and then its end."""
    matcher = engine.compile(kind, text).start()
    for token in TOKENIZER.encode(answer, add_special_tokens=False).ids:
        tokens, _ = allowed(matcher)
        if matcher.advance(np.array([token], np.int32)) != (token in tokens):
            raise AssertionError(f"the mask says otherwise of {token} in {answer}")
        if token not in tokens:
            return False
    return allowed(matcher)[1]


DAYS = ['"2024-02-29"', '"2000-02-29"', '"1904-02-29"', '"2487-02-28"', '"2487-12-31"']
NO_DAYS = ['"2487-02-29"', '"2100-02-29"', '"2024-02-30"', '"2487-04-31"', '"0000-01-01"']
DEEP = '{"items": ' * 3000 + '{"format": "date"}' + "}" * 3000
CASES = [
    (GrammarKind.REGEX, r"[a-c]{2,3}!", ["ab!", "abc!"], ["a!", "abca!", "ab"]),
    (GrammarKind.CHOICE, '["cat", "dög", "a \\"b\\"\\n\\\\", "x|y"]',
     ["cat", "dög", 'a "b"\n\\', "x|y"], ["ca", "cats", "x", ""]),
    (GrammarKind.GRAMMAR, 'start: "x" "y"+', ["xy", "xyyy"], ["x", "yx"]),
    (GrammarKind.GRAMMAR, 'root ::= "x" ("y" | "z")*', ["x", "xyz"], ["y", "xx"]),
    (GrammarKind.JSON_SCHEMA, '{"type": "object"}', ["{}", '{"a":[1,{"b":null}]}'],
     ["[]", '{"a":}', "{"]),
    (GrammarKind.JSON_SCHEMA, "true", ["{}", "[1]", "null"], ["{", ""]),
    (GrammarKind.JSON_SCHEMA, '{"enum": ["a", 3, null]}', ['"a"', "3", "null"], ['"b"', "4"]),
    (GrammarKind.JSON_SCHEMA, '{"type": "string", "format": "date"}', DAYS, NO_DAYS),
    (GrammarKind.JSON_SCHEMA, '{"type": ["null", "string"], "format": "date", "pattern": "^2"}',
     ["null", '"2000-02-29"'], ['"1996-02-29"', '"2100-02-29"']),
    (GrammarKind.JSON_SCHEMA, '{"type": "string", "format": "date-time"}',
     ['"2024-02-29T01:02:03Z"'], ['"2023-02-29T01:02:03Z"']),
    (GrammarKind.JSON_SCHEMA,
     '{"properties": {"const": {"type": "string", "format": "date"},'
     ' "a": {"const": {"format": "date"}}}, "additionalProperties": false}',
     ['{"const":"2024-02-29"}', '{"a":{"format":"date"}}'], ['{"const":"2023-02-29"}']),
]  # fmt: skip


@pytest.mark.feature("R4")
@pytest.mark.parametrize(("kind", "text", "right", "wrong"), CASES)
def test_a_grammar_allows_its_answers_alone(
    engine: LLGuidanceEngine, kind: GrammarKind, text: str, right: list[str], wrong: list[str]
) -> None:
    assert [answer for answer in right if not accepts(engine, kind, text, answer)] == []
    assert [answer for answer in wrong if accepts(engine, kind, text, answer)] == []


def test_json_has_no_white_space_unless_asked_for() -> None:
    schema = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
    for whitespace in (False, True):
        engine = make_engine(whitespace=whitespace)
        assert accepts(engine, GrammarKind.JSON_SCHEMA, schema, '{"a": 1}') is whitespace
        assert accepts(engine, GrammarKind.JSON_SCHEMA, schema, '{"a":1}')


@pytest.mark.parametrize(
    "draft",
    ["https://json-schema.org/draft/2020-12/schema", "http://json-schema.org/draft-07/schema#", ""],
)
def test_schemas_of_several_tools_keep_their_references_apart(
    engine: LLGuidanceEngine, draft: str
) -> None:
    point = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    schemas: dict[str, dict[str, object]] = {
        "move": {"$ref": "#/$defs/P", "$defs": {"P": point}},
        "say": {"properties": {"p": {"$ref": "#/$defs/P"}}, "$defs": {"P": {"type": "string"}}},
        "nest": {"properties": {"in": {"$ref": "#"}}, "additionalProperties": False},
    }
    if draft:
        for schema in schemas.values():
            schema |= {"$schema": draft, "$id": "https://example.com/schema"}
    tools = [Tool(name=name, parameters=schema) for name, schema in schemas.items()]
    calls = {
        "move": ['{"x":1}', '{"x":"1"}'],
        "say": ['{"p":"a"}', '{"p":{"x":1}}', "5"],
        "nest": ['{"in":{"in":{}}}', '{"in":{"p":{}}}'],
    }
    for name, (right, *wrong) in calls.items():
        (tool,) = (each for each in tools if each.name == name)
        alone = json.dumps(make_call_schema([tool]))
        among = json.dumps(make_call_schema(tools))
        for arguments in (right, *wrong):
            text = f'{{"name":"{name}","parameters":{arguments}}}'
            for schema, answer in ((alone, arguments), (among, text)):
                is_taken = accepts(engine, GrammarKind.JSON_SCHEMA, schema, answer)
                assert is_taken is (arguments == right), answer


@pytest.mark.feature("R4")
@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (GrammarKind.JSON_SCHEMA, '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        (GrammarKind.JSON_SCHEMA, '{"not": {"type": "null"}}', '"not"'),
        (GrammarKind.JSON_SCHEMA, '{"type": "zork"}', "Invalid type: zork"),
        (GrammarKind.JSON_SCHEMA, "false", "Unsatisfiable schema"),
        (GrammarKind.JSON_SCHEMA, '{"pattern": "("}', "regex parse error"),
        (GrammarKind.JSON_SCHEMA, '{"format": "date", "allOf": 5}', "allOf"),
        (GrammarKind.JSON_SCHEMA, DEEP, "recursion limit"),
        (GrammarKind.JSON_SCHEMA, '{"format": "date", "allOf": {"a": 1}}', "allOf"),
        (GrammarKind.REGEX, "(?=a)b", "look-around|invalid regex"),
        (GrammarKind.REGEX, "[", "invalid regex"),
        (GrammarKind.GRAMMAR, "start: foo", "unknown name"),
        (GrammarKind.GRAMMAR, 'root ::= ("x"', r"GBNF: Expected '\)' at line 1$"),
        (GrammarKind.GRAMMAR, 'root ::= foo "x"', "GBNF: Rule 'foo' not found"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    engine: LLGuidanceEngine, kind: GrammarKind, text: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        engine.compile(kind, text)


BOMBS = {
    "nesting": (GrammarKind.REGEX, "(" * 8000 + "a" + ")" * 8000),
    "repetitions": (GrammarKind.REGEX, "((a{1,1000}){1,1000}){1,1000}"),
    "backtracking": (GrammarKind.REGEX, "(x+x+)+y"),
    "distance": (GrammarKind.REGEX, ".*a.{1000}"),
    "ambiguity": (GrammarKind.GRAMMAR, 'start: e\ne: e e | "a" | "aa" | "aaa"'),
    "enum": (GrammarKind.JSON_SCHEMA, json.dumps({"enum": [f"{i}" * 9 for i in range(5000)]})),
    "items": (GrammarKind.JSON_SCHEMA, '{"type":"array","items":{},"maxItems":10000000}'),
    "recursion": (GrammarKind.JSON_SCHEMA, '{"anyOf":[{"$ref":"#"},{"$ref":"#"}]}'),
    "lengths": (
        GrammarKind.JSON_SCHEMA,
        json.dumps({"items": {"type": "string", "minLength": 10**6, "maxLength": 10**9}}),
    ),
}


@pytest.mark.feature("W5")
@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_or_followed_within_bounds(engine: LLGuidanceEngine, name: str) -> None:
    rng, began = random.Random(1), time.process_time()
    try:
        matcher = engine.compile(*BOMBS[name]).start()
        for _ in range(60):
            tokens, _ = allowed(matcher)
            if not tokens:
                break
            assert matcher.advance(np.array([rng.choice(sorted(tokens))], np.int32)) == 1
    except ValueError:
        pass  # refused, or a limit is reached
    assert time.process_time() - began < 30  # without bounds they take minutes


@pytest.mark.parametrize("threads", [1, 2])
def test_masks_of_drafts_are_those_of_one_token_at_a_time(threads: int) -> None:
    engine = make_engine(threads=threads)
    schema = '{"type":"array","items":{"type":"integer"},"minItems":1,"maxItems":30}'
    grammar = engine.compile(GrammarKind.JSON_SCHEMA, schema)
    texts = ["[1,23", "[", "[4,5,6]", "[[", ""]
    drafts = [
        np.array(TOKENIZER.encode(text, add_special_tokens=False).ids, np.int32) for text in texts
    ]
    for given in (drafts, [draft[:0] for draft in drafts]):
        matchers = [grammar.start() for _ in given]
        masks = np.full((sum(len(draft) + 1 for draft in given), WORDS), -1, np.int32)
        ends = engine.fill_masks(list(zip(matchers, given, strict=True)), masks)
        at = 0
        for draft, found in zip(given, ends, strict=True):
            assert isinstance(found, tuple)
            alone = grammar.start()
            for i, may_end in enumerate(found):
                wanted = np.zeros(WORDS, np.int32)
                assert alone.fill_mask(wanted) == may_end
                assert (masks[at + i] == wanted).all()
                if i < len(draft) and i + 1 < len(found):
                    assert alone.advance(draft[i : i + 1]) == 1
            assert (masks[at + len(found) : at + len(draft) + 1] == -1).all()
            at += len(draft) + 1
        # Each is where it was.
        assert all(allowed(matcher) == allowed(grammar.start()) for matcher in matchers)


def test_an_answer_that_becomes_too_complex_is_an_error_and_no_end() -> None:
    engine = make_engine()
    engine.limits = llguidance.LLParserLimits(step_max_items=3, verbose_errors=False)
    grammar = engine.compile(GrammarKind.GRAMMAR, 'start: e\ne: "b" e | "a" | "aa" | "aaa"')
    with pytest.raises(ValueError, match=r"limit|complex|items"):
        allowed(grammar.start())


def nest(count: int) -> dict[str, object]:
    """A schema whose objects have `count` properties that may be left out."""
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}}


DEFS = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
MUTUAL = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
ENDLESS = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
LARK = GrammarKind.GRAMMAR
UNFOLLOWED = {
    "a reference to itself": (GrammarKind.JSON_SCHEMA, DEFS, "a rule refers to itself alone"),
    "two references in turn": (GrammarKind.JSON_SCHEMA, MUTUAL, "a rule refers to itself alone"),
    "the root": (GrammarKind.JSON_SCHEMA, {"$ref": "#"}, "a rule refers to itself alone"),
    "an object without end": (GrammarKind.JSON_SCHEMA, ENDLESS, "Too many items"),
    "an array without end": (
        GrammarKind.JSON_SCHEMA,
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        "Too many items",
    ),
    "500 properties": (GrammarKind.JSON_SCHEMA, nest(500), "Current row has 2007 items; max is"),
    "a rule of itself": (LARK, "start: start", "a rule refers to itself alone"),
    "rules in turn": (LARK, 'start: a\na: b "x"\nb: a "y"', "a rule refers to itself alone"),
    "a GBNF rule of itself": (LARK, "root ::= root", "a rule refers to itself alone"),
    "2,000 rules": (
        LARK,
        f"start: {' | '.join(f'r{i}' for i in range(2000))}\n"
        + "\n".join(f'r{i}: "a{i}"' for i in range(2000)),
        "max is 2000",
    ),
    "100,000 times a letter": (LARK, 'start: "x"{100000}', "Too many items"),
    "a million times a letter": (GrammarKind.REGEX, "(a{1000}){1000}", "too many expressions"),
    "nothing": (GrammarKind.REGEX, r"[^\s\S]", "nothing can match"),
}


@pytest.mark.feature("W5")
@pytest.mark.parametrize("name", UNFOLLOWED)
def test_what_no_answer_can_follow_is_refused_in_the_trial(
    engine: LLGuidanceEngine, name: str
) -> None:
    kind, given, reason = UNFOLLOWED[name]
    text = given if isinstance(given, str) else json.dumps(given)
    vocabulary = Vocabulary(tokenizer_file=str(FILE), size=SIZE, end_ids=(END,))
    answer = try_grammar(engine, vocabulary, {"kind": kind.value, "text": text})
    assert reason in answer["error"] and "broken" not in answer


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (LARK, 'start: start "a" | "b"'),
        (LARK, 'start: ""'),
        (LARK, 'start: e start "a" | "b"\ne: ""'),
        (GrammarKind.REGEX, "(a|b)*a(a|b){30}"),
        (GrammarKind.CHOICE, '["\U0001f600", "\u00e4"]'),
        (GrammarKind.JSON_SCHEMA, '{"anyOf": [{"$ref": "#"}, {"type": "string"}]}'),
        (GrammarKind.JSON_SCHEMA, '{"type": "array", "minItems": 1000000000}'),
        (GrammarKind.JSON_SCHEMA, json.dumps({**nest(500), "additionalProperties": False})),
    ],
)
def test_what_answers_can_follow_passes_the_trial(
    engine: LLGuidanceEngine, kind: GrammarKind, text: str
) -> None:
    vocabulary = Vocabulary(tokenizer_file=str(FILE), size=SIZE, end_ids=(END, SIZE + 5))
    assert try_grammar(engine, vocabulary, {"kind": kind.value, "text": text}) == {}


def test_a_limit_that_a_token_reaches_is_told_from_a_token_that_is_not_allowed(
    engine: LLGuidanceEngine,
) -> None:
    matcher = engine.compile(GrammarKind.JSON_SCHEMA, json.dumps(nest(500))).start()
    brace, other = (TOKENIZER.encode(text, add_special_tokens=False).ids[:1] for text in "{x")
    assert matcher.advance(np.array(other, np.int32)) == 0
    with pytest.raises(ValueError, match="Current row has 2007 items"):
        matcher.advance(np.array(brace, np.int32))
