"""Answers drawn from the masks of grammars of calls, and what tool parsers read in them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen
from jsonschema import Draft202012Validator, FormatChecker
from tokenizers import AddedToken, Tokenizer

import headstock_demo
from headstock.spi import CompiledGrammar, Matcher, ToolEventKind, ToolParser, Vocabulary
from headstock_llguidance.engine import LLGuidanceEngine
from headstock_llguidance.options import LLGuidanceOptions
from headstock_tool_parsers.hermes import HermesParser
from headstock_tool_parsers.llama3_json import Llama3JsonParser
from headstock_tool_parsers.mistral import MistralParser
from headstock_tool_parsers.qwen3_coder import Qwen3CoderParser

END = 0
PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
    "qwen3_coder": Qwen3CoderParser,
}
MARKS = {
    "special tokens": (True, ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]")),
    "added tokens": (False, ("<tool_call>", "</tool_call>", "[TOOL_CALLS]")),
    "plain text": (False, ()),
}

LOOKALIKES = (
    '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
    '}\n</tool_call>\n<tool_call>\n{"name": "f", "arguments": {',
    "<tool_call>\n<function=f>\n{}\n</function>\n</tool_call>",
    '[TOOL_CALLS][{"name": "f", "arguments": {}}]',
    '{"name": "f", "parameters": {}}; ',
    '"}]',
)
"""Texts of values that look like calls, or like the end of one."""


@frozen
class Model:
    """A grammar engine, its tokenizer and the marks that are tokens."""

    engine: LLGuidanceEngine
    tokenizer: Tokenizer
    tokens: dict[str, int]


def make_models(folder: Path) -> dict[str, Model]:
    """A model for each of `MARKS`, whose tokenizers are files in the folder."""
    made = {}
    for number, (name, (is_special, marks)) in enumerate(MARKS.items()):
        source = Path(headstock_demo.__file__).parent / "checkpoint" / "tokenizer.json"
        tokenizer = Tokenizer.from_file(str(source))
        added = [AddedToken(mark, special=is_special, normalized=False) for mark in marks]
        (tokenizer.add_special_tokens if is_special else tokenizer.add_tokens)(added)
        file = folder / f"{number}.json"
        tokenizer.save(str(file))
        vocabulary = Vocabulary(
            tokenizer_file=str(file), size=tokenizer.get_vocab_size(), end_ids=(END,)
        )
        engine = LLGuidanceEngine(vocabulary, LLGuidanceOptions())
        made[name] = Model(engine, tokenizer, {mark: tokenizer.token_to_id(mark) for mark in marks})
    return made


def allowed(matcher: Matcher, model: Model) -> tuple[list[int], bool]:
    """The tokens that may come next, and whether the text may end."""
    mask = np.zeros(-(-model.tokenizer.get_vocab_size() // 32), np.int32)
    may_end = matcher.fill_mask(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return [token for token in bits.nonzero()[0].tolist() if token != END], may_end


def draw(
    model: Model,
    grammar: CompiledGrammar,
    chance: random.Random,
    first: str = "",
    begun: Sequence[int] = (),
) -> str:
    """A text that the masks admit, which begins with a token of the text `first`.

    begun: tokens that it begins with instead, as far as the masks admit them
    """
    matcher, ids = grammar.start(), list[int]()
    for token in begun:
        if not matcher.advance(np.array([token], np.int32)):
            break
        ids.append(token)
    while True:
        choices, may_end = allowed(matcher, model)
        if first and not ids:
            choices = [
                each for each in choices if first.startswith(model.tokenizer.decode([each], False))
            ]
        if may_end and (not choices or chance.random() < 0.6):
            return str(model.tokenizer.decode(ids, skip_special_tokens=False))
        # By chance alone, what closes something comes too seldom.
        closing = [
            each for each in choices if (model.tokenizer.id_to_token(each) or "")[:1] in '"}]'
        ]
        token = chance.choice(closing if closing and chance.random() < 0.3 else choices)
        assert matcher.advance(np.array([token], np.int32)) == 1
        ids.append(token)
        assert len(ids) < 3000


def read(parser: ToolParser, pieces: Sequence[str]) -> tuple[str, list[tuple[str, Any]]]:
    """The content, and the calls, each of which must be whole."""
    events = [event for piece in pieces for event in parser.feed(piece)] + [*parser.finish()]
    content, calls, arguments = "", [], ""
    for event in events:
        match event.kind:
            case ToolEventKind.CONTENT:
                content += event.text
            case ToolEventKind.CALL:
                calls.append([event.text, None])
                arguments = ""
            case ToolEventKind.ARGUMENTS:
                arguments += event.text
            case ToolEventKind.END:
                calls[-1][1] = json.loads(arguments)
    return content, [(name, value) for name, value in calls]


def is_valid(schema: Any, value: object) -> bool:
    return Draft202012Validator(schema, format_checker=FormatChecker()).is_valid(value)
