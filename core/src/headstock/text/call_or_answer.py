"""Answers that follow a schema unless they are calls of tools: one grammar for both."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from headstock.errors import RequestError, shorten
from headstock.spi import Tool, ToolEvent, ToolEventKind, ToolParser, WrittenCall
from headstock.structured_outputs import PARAMETER
from headstock.text.template_calls import SAMPLE

FIRST_KEY: Final = re.compile(r'\s*\{\s*("(?:[^"\\]|\\.)*")\s*:')
MAX_REFERENCES: Final = 64
"""References that a schema may follow until it says what an answer begins with."""


class CallOrAnswerParser(ToolParser):
    """Reads an answer of such a grammar: what begins with one of `signs`, after white space, is
    read by `parser`, and everything else is content, whatever texts it has.
    """

    def __init__(self, parser: ToolParser, signs: Sequence[str]) -> None:
        self.parser = parser
        self.signs = tuple(signs)
        self.held = ""
        self.is_call: bool | None = None

    def feed(self, text: str) -> list[ToolEvent]:
        """The events of the text, once it is known what the answer is."""
        if self.is_call is None:
            self.held += text
            begun = self.held.lstrip()
            is_call = begun.startswith(self.signs)
            if not is_call and any(sign.startswith(begun) for sign in self.signs):
                return []
            self.is_call, text, self.held = is_call, self.held, ""
        if not text:
            return []
        return (
            list(self.parser.feed(text))
            if self.is_call
            else [ToolEvent(ToolEventKind.CONTENT, text)]
        )

    def finish(self) -> list[ToolEvent]:
        """The events of what was held back."""
        if self.is_call:
            return list(self.parser.finish())
        held, self.held = self.held, ""
        return [ToolEvent(ToolEventKind.CONTENT, held)] if held else []


def refuse_structure(reason: str) -> RequestError:
    """The error for a structure that the reason keeps from being combined with tools."""
    return RequestError(
        f"{PARAMETER} cannot be combined with tools here: {reason}; give tool_choice "
        '"none", or leave one of the two out',
        PARAMETER,
    )


class CallForms:
    """How calls of the tools that a request offers are written.

    tools: with the schemas that arguments must follow
    samples: calls of `SAMPLE` as the chat template writes them
    refuse: makes the error for the reason why such calls cannot be had
    raises: ValueError for a parser that does not read its own calls; RequestError for one that
        does not say how calls are written
    """

    def __init__(
        self,
        make_parser: Callable[[Sequence[Tool]], ToolParser],
        tools: Sequence[Tool],
        samples: Sequence[str],
        refuse: Callable[[str], RequestError] = refuse_structure,
    ) -> None:
        self.tools = tools
        sample_forms = make_parser([SAMPLE]).write_call(SAMPLE.name)
        if not sample_forms:
            raise refuse("the tool parser does not say how calls are written")
        number = _find_form(sample_forms, samples)
        parser = make_parser(tools)
        self.call_marks, self.call_starts = parser.call_marks, parser.call_starts
        self.written = [parser.write_call(tool.name)[number] for tool in tools]
        for tool, written in zip(tools, self.written, strict=True):
            _check_written(partial(make_parser, tools), tool.name, written)

    @property
    def openings(self) -> tuple[str, ...]:
        """What answers that are calls begin with."""
        return tuple(f"{each.begin}{each.before}" for each in self.written)

    @property
    def signs(self) -> tuple[str, ...]:
        """What tells calls from JSON: of an opening, as much as no JSON begins with, or all."""
        # Some tokenizers write a space after a mark, so little of the text is compared.
        return tuple(dict.fromkeys(map(_find_sign, self.openings)))

    def write_grammar(self, tokens: Mapping[str, int], *, allows_several: bool) -> dict[str, Any]:
        """The calls and what is around them, as `GrammarKind.JSON_OR_CALLS` has them.

        tokens: texts that are tokens of their own, with their ids
        """

        first = self.written[0]
        return {
            "calls": [
                _write_call(tool, call.before, call.after, tokens)
                for tool, call in zip(self.tools, self.written, strict=True)
            ],
            "begin": split_tokens(first.begin, tokens),
            "end": split_tokens(first.end, tokens),
            "separator": split_tokens(first.separator, tokens)
            if allows_several and first.separator is not None
            else None,
        }

    def write_text_grammar(
        self,
        tokens: Mapping[str, int],
        *,
        allows_several: bool,
        refuse: Callable[[str], RequestError],
        without: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Text or calls, as `GrammarKind.TEXT_OR_CALLS` has them.

        tokens: texts that are tokens of their own, with their ids
        without: further texts that no text has
        raises: RequestError, made by `refuse`, where nothing tells calls from text
        """
        first, *_ = self.written
        mark = next((each for each in self.call_marks if self._begin_with(each)), "")
        is_bare = all(each.startswith(self.call_starts) for each in self.openings)
        if not self.call_marks or not (mark or is_bare):
            raise refuse("the tool parser does not say what tells calls from text")
        # Where each call has the mark, so has what comes between two of them.
        is_repeated = not first.begin
        separator = first.separator
        if separator is not None and is_repeated:
            separator += mark
        return {
            "mark": split_tokens(mark, tokens),
            "calls": [
                _write_call(tool, call.before[len(mark) * is_repeated :], call.after, tokens)
                for tool, call in zip(self.tools, self.written, strict=True)
            ],
            "begin": split_tokens(first.begin[len(mark) :], tokens),
            "end": split_tokens(first.end, tokens),
            "separator": split_tokens(separator, tokens)
            if allows_several and separator is not None
            else None,
            "without": list(dict.fromkeys((*self.call_marks, *without))),
            "not_first": list(self.call_starts),
        }

    def _begin_with(self, mark: str) -> bool:
        """Whether the calls of an answer begin with the mark, or each of them does."""
        return all((each.begin or each.before).startswith(mark) for each in self.written)

    def check_apart(self, schema: object) -> None:
        """Raise RequestError unless no answer of the schema begins as a call does."""
        for opening in self.openings:
            if _can_begin(schema, opening):
                raise RequestError(
                    f"{PARAMETER} cannot be combined with these tools: an answer of this schema "
                    f"may begin as a call does, with {shorten(opening)}; close the schema's object "
                    'and rename its property, give tool_choice "none", or leave one of the two out',
                    PARAMETER,
                )


def split_tokens(text: str, tokens: Mapping[str, int]) -> list[dict[str, Any]]:
    """The text as segments: a model knows a text that is a token as the token that it is."""
    marks = "|".join(map(re.escape, tokens))
    parts = re.split(f"({marks})", text) if marks else [text]
    return [{"token": tokens[part]} if part in tokens else {"text": part} for part in parts if part]


def _write_call(
    tool: Tool, before: str, after: str, tokens: Mapping[str, int]
) -> list[dict[str, Any]]:
    """The segments of a call."""
    # Arguments are an object even where a schema does not say so.
    arguments = {"json": {"type": "object", **tool.parameters}}
    return [*split_tokens(before, tokens), arguments, *split_tokens(after, tokens)]


def _find_form(forms: Sequence[WrittenCall], samples: Sequence[str]) -> int:
    """The first form that a sample has, whatever its white space; otherwise the first."""
    for number, form in enumerate(forms):
        opening = _drop_space(form.begin + form.before)
        if any(opening in _drop_space(sample) for sample in samples):
            return number
    return 0


def _drop_space(text: str) -> str:
    return "".join(text.split())


def _check_written(make_parser: Callable[[], ToolParser], name: str, written: WrittenCall) -> None:
    """Raise ValueError unless the parser reads a call that is written so, alone and twice."""
    call = f"{written.before}{{}}{written.after}"
    for count in (1,) if written.separator is None else (1, 2):
        text = written.begin + (written.separator or "").join([call] * count) + written.end
        parser = make_parser()
        events = [*parser.feed(text), *parser.finish()]
        arguments = [e.text.strip() for e in events if e.kind is ToolEventKind.ARGUMENTS]
        read = [(e.kind, e.text) for e in events if e.kind is not ToolEventKind.ARGUMENTS]
        expected = [(ToolEventKind.CALL, name), (ToolEventKind.END, "")] * count
        if not written.before or read != expected or "".join(arguments) != "{}" * count:
            raise ValueError(f"write_call: the parser does not read {shorten(text)} as it says")


def _can_begin(schema: object, opening: str) -> bool:
    """Whether an answer of the schema may begin as `opening` does; True where that is uncertain."""
    key = FIRST_KEY.match(opening)
    if key is not None:
        return _can_have(schema, json.loads(key[1]), schema, MAX_REFERENCES)
    return _is_json_start(opening)


def _find_sign(opening: str) -> str:
    """The shortest beginning of the opening that no JSON has; all of it where there is none."""
    beginnings = (opening[:length] for length in range(1, len(opening)))
    return next((each for each in beginnings if not _is_json_start(each)), opening)


def _is_json_start(text: str) -> bool:
    """Whether a JSON text may begin so; True where that is uncertain."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        rest = text[error.pos :]
        # More text might make these right.
        return rest.startswith('"') or any(
            word.startswith(rest) for word in ("true", "false", "null", "-")
        )
    return True


def _can_have(schema: object, name: str, root: object, most: int) -> bool:
    """Whether a value of the schema may be an object with this member."""
    if not isinstance(schema, Mapping) or most <= 0:
        return schema is not False
    kind = schema.get("type")
    if isinstance(kind, str) and kind != "object":
        return False
    properties = schema.get("properties")
    if schema.get("additionalProperties") is False and "patternProperties" not in schema:
        return isinstance(properties, Mapping) and name in properties
    for word in ("anyOf", "oneOf"):
        branches = schema.get(word)
        if isinstance(branches, list):
            return any(_can_have(each, name, root, most - 1) for each in branches)
    reference = schema.get("$ref")
    if isinstance(reference, str) and isinstance(root, Mapping):
        match = re.fullmatch(r"#/(\$defs|definitions)/([^/~%]+)", reference)
        if match is not None and isinstance(root.get(match[1]), Mapping):
            return _can_have(root[match[1]].get(match[2]), name, root, most - 1)
    return True
