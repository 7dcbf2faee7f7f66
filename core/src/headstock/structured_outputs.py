"""The structure that an answer must have. Names and meanings are vLLM's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Final

from attrs import asdict, field, frozen
from attrs.validators import deep_iterable, optional

from headstock.errors import RequestError, find_nearest_name, shorten
from headstock.spi import GrammarKind

MAX_SCHEMA_BYTES: Final = 256 << 10
MAX_SCHEMA_DEPTH: Final = 64
MAX_REGEX_BYTES: Final = 16 << 10
MAX_CHOICES: Final = 1024

_MOST_WHITE: Final = 8
"""How much longer a schema given as text may be than without its white space."""

PARAMETER: Final = "structured_outputs"
CALL_PARTS: Final = frozenset({"calls", "begin", "end", "separator"})
TEXT_PARTS: Final = CALL_PARTS | {"mark", "without", "not_first"}
STRUCTURES: Final = ("json", "regex", "choice", "grammar", "json_object")
"""The ways to give a structure."""


def _wrong(rule: str, value: object) -> RequestError:
    return RequestError(f"{PARAMETER}: {rule}, got {shorten(value)}", PARAMETER)


def _to_schema(value: Any) -> str | None:
    """The text of a JSON schema, given as text or as a mapping.   raises: RequestError"""
    if value is None:
        return None
    if isinstance(value, str) and len(value) > _MOST_WHITE * MAX_SCHEMA_BYTES:
        _check_size("json", value, MAX_SCHEMA_BYTES)
    try:
        schema = json.loads(value) if isinstance(value, str) else value
        if not isinstance(schema, Mapping | bool):
            raise _wrong("json: expected a JSON schema, as text or as a mapping", value)
        depth = _measure_depth(schema)
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, TypeError, RecursionError, UnicodeError) as error:
        if isinstance(error, RecursionError):
            raise _too_deep() from None
        raise _wrong(f"json: expected a JSON schema ({shorten(error)})", value) from None
    if depth > MAX_SCHEMA_DEPTH:
        raise _too_deep()
    _check_size("json", text, MAX_SCHEMA_BYTES)
    return text


def _too_deep(name: str = "json") -> RequestError:
    return RequestError(
        f"{PARAMETER}: {name} is nested deeper than {MAX_SCHEMA_DEPTH} levels; use $defs or "
        "flatten it",
        PARAMETER,
    )


def _measure_depth(value: Any) -> int:
    """How deep lists and mappings are nested, as far as the limit and one more.

    raises: RequestError for more values than the limit of bytes can hold
    """
    level, depth, count = [value], 0, 0
    while depth <= MAX_SCHEMA_DEPTH:
        children = (
            child
            for node in level
            if isinstance(node, Mapping | list | tuple)
            for child in (node.values() if isinstance(node, Mapping) else node)
        )
        level = list(islice(children, MAX_SCHEMA_BYTES + 1))
        count += len(level)
        if count > MAX_SCHEMA_BYTES:
            raise RequestError(
                f"{PARAMETER}: json has more than {MAX_SCHEMA_BYTES} values; at most "
                f"{MAX_SCHEMA_BYTES} bytes are taken",
                PARAMETER,
            )
        if not level:
            break
        depth += 1
    return depth


def _check_size(name: str, text: str, most: int) -> None:
    """Raise RequestError when a text has too many bytes."""
    size = len(text.encode())
    if size > most:
        raise RequestError(
            f"{PARAMETER}: {name} has {size} bytes; at most {most} are taken", PARAMETER
        )


def _to_choices(value: Any) -> tuple[str, ...] | None:
    """Texts to choose from.   raises: RequestError"""
    if value is None:
        return None
    if (
        isinstance(value, str)
        or not isinstance(value, Sequence)
        or not 1 <= len(value) <= MAX_CHOICES
        or not all(isinstance(text, str) and text for text in value)
    ):
        raise _wrong(
            f"choice: expected a list of 1 to {MAX_CHOICES} texts that are not empty", value
        )
    return tuple(value)


def _to_regex(value: Any) -> str | None:
    """A regular expression.   raises: RequestError"""
    return _to_text("regex", value, MAX_REGEX_BYTES)


def _to_grammar(value: Any) -> str | None:
    """A context-free grammar.   raises: RequestError"""
    return _to_text("grammar", value, MAX_SCHEMA_BYTES)


def _to_text(name: str, value: Any, most: int) -> str | None:
    """A text of at most `most` bytes, or None.   raises: RequestError"""
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise _wrong(f"{name}: expected a text that is not empty", value)
    try:
        _check_size(name, value, most)
    except UnicodeEncodeError:
        raise _wrong(f"{name} holds characters that are not valid Unicode", value) from None
    return value


def _to_bool(value: Any) -> bool:
    if value is None:
        return False
    if not isinstance(value, bool):
        raise _wrong("json_object: expected true or false", value)
    return value


def _to_reasoning(value: Any) -> ReasoningTokens | None:
    """The tokens around reasoning, given as such or as a mapping.   raises: RequestError"""
    if value is None or isinstance(value, ReasoningTokens):
        return value
    known = {"start", "end", "without"}
    if not isinstance(value, Mapping) or not set(value) <= known or "end" not in value:
        raise _wrong("after_reasoning: expected end, and start where needed", value)
    return ReasoningTokens(**value)


def _to_calls(value: Any, name: str = "or_calls", parts: frozenset[str] = CALL_PARTS) -> str | None:
    """Calls as `GrammarKind.JSON_OR_CALLS` has them, given as text or as a mapping.

    raises: RequestError
    """
    if value is None:
        return None
    try:
        calls = json.loads(value) if isinstance(value, str) else value
        if not isinstance(calls, Mapping) or set(calls) != parts:
            raise _wrong(f"{name}: expected an object of {', '.join(sorted(parts))}", value)
        schemas = [segment.get("json") for call in calls["calls"] for segment in call]
        if any(_measure_depth(schema) > MAX_SCHEMA_DEPTH for schema in schemas):
            raise _too_deep("the schema of a tool")
        return json.dumps(calls, ensure_ascii=False)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise _wrong(f"{name}: expected JSON ({shorten(error)})", value) from None


def _to_text_or_calls(value: Any) -> str | None:
    """The same for `GrammarKind.TEXT_OR_CALLS`.   raises: RequestError"""
    return _to_calls(value, "text_or_calls", TEXT_PARTS)


def _check_token(instance: object, attribute: Any, value: Any) -> None:
    """Raise RequestError unless the value is a token's id."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise _wrong(f"after_reasoning.{attribute.name}: expected a token's id", value)


def _to_tokens(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise _wrong("after_reasoning.without: expected a list of tokens' ids", value)
    return tuple(value)


@frozen(kw_only=True)
class ReasoningTokens:
    """The ids of the tokens around reasoning.

    start: may be the first token of an answer; None where the prompt has begun the reasoning
    without: tokens that reasoning may not have

    raises: RequestError
    """

    start: int | None = field(default=None, validator=optional(_check_token))
    end: int = field(validator=_check_token)
    without: tuple[int, ...] = field(
        default=(), converter=_to_tokens, validator=deep_iterable(_check_token)
    )

    def __attrs_post_init__(self) -> None:
        if self.start == self.end:
            raise _wrong("after_reasoning: expected different tokens for start and end", self.end)


@frozen(kw_only=True)
class StructuredOutputsParams:
    """The structure that an answer must have; exactly one is given.

    json: a JSON schema, as text or as a mapping; the answer has no white space between tokens
    regex: a regular expression that matches the whole answer
    choice: texts, one of which is the answer
    grammar: a context-free grammar, in the syntax of the grammar plugin
    json_object: any JSON object
    after_reasoning: the structure begins behind these; `LLM.chat` sets it where a model reasons
    or_calls: the answer may be calls of tools instead, as `GrammarKind.JSON_OR_CALLS` has them;
        `LLM.chat` sets it where the model may call tools
    text_or_calls: text, or calls of tools, as `GrammarKind.TEXT_OR_CALLS` has them; `LLM.chat` sets
        it where a tool is strict

    raises: RequestError
    """

    json: str | None = field(default=None, converter=_to_schema)
    regex: str | None = field(default=None, converter=_to_regex)
    choice: tuple[str, ...] | None = field(default=None, converter=_to_choices)
    grammar: str | None = field(default=None, converter=_to_grammar)
    json_object: bool = field(default=False, converter=_to_bool)
    after_reasoning: ReasoningTokens | None = field(default=None, converter=_to_reasoning)
    or_calls: str | None = field(default=None, converter=_to_calls)
    text_or_calls: str | None = field(default=None, converter=_to_text_or_calls)

    def __attrs_post_init__(self) -> None:
        names = [name for name in (*STRUCTURES, "text_or_calls") if getattr(self, name)]
        if len(names) != 1:
            raise RequestError(
                f"{PARAMETER}: expected exactly one of {', '.join(STRUCTURES)}, "
                f"got {' and '.join(names) or 'none'}",
                PARAMETER,
            )
        if self.or_calls is not None and not (self.json or self.json_object):
            raise _wrong("or_calls: expected json or json_object beside it", names[0])
        if self.text_or_calls is not None:
            _check_size("the grammar of strict tools", self.text, MAX_SCHEMA_BYTES)
        else:
            _check_size(names[0], self.text, MAX_SCHEMA_BYTES)

    @property
    def call_mark(self) -> Sequence[Mapping[str, Any]]:
        """The segments between text and calls; none where no text comes before calls."""
        return json.loads(self.text_or_calls)["mark"] if self.text_or_calls is not None else ()

    @property
    def label(self) -> str:
        """What errors call the structure."""
        return PARAMETER if self.text_or_calls is None else "strict tools"

    @property
    def kind(self) -> GrammarKind:
        """How the structure is given."""
        if self.or_calls is not None:
            return GrammarKind.JSON_OR_CALLS
        if self.text_or_calls is not None:
            return GrammarKind.TEXT_OR_CALLS
        if self.json is not None or self.json_object:
            return GrammarKind.JSON_SCHEMA
        if self.regex is not None:
            return GrammarKind.REGEX
        return GrammarKind.CHOICE if self.choice is not None else GrammarKind.GRAMMAR

    @property
    def text(self) -> str:
        """The structure as a grammar plugin reads it."""
        if self.or_calls is not None:
            # Both are JSON objects.
            return f'{{"json": {self.schema}, {self.or_calls[1:]}'
        if self.json_object:
            return self.schema
        if self.choice is not None:
            return json.dumps(self.choice, ensure_ascii=False)
        return self.json or self.regex or self.grammar or self.text_or_calls or ""

    @property
    def schema(self) -> str:
        """The JSON schema; empty for another structure."""
        return '{"type": "object"}' if self.json_object else self.json or ""

    @property
    def depth(self) -> int:
        """The levels of lists and objects that the schema has; 0 for another structure."""
        return 0 if self.json is None else _measure_depth(json.loads(self.json))

    def as_dict(self) -> dict[str, object]:
        """The structure that is given, under its name, and what it comes after."""
        return {name: value for name, value in asdict(self).items() if value}


def to_structured_outputs(value: Any) -> StructuredOutputsParams | None:
    """The parameters, given as such or as a mapping of their names.   raises: RequestError"""
    if value is None or isinstance(value, StructuredOutputsParams):
        return value
    if not isinstance(value, Mapping):
        raise _wrong("expected a StructuredOutputsParams or a mapping", value)
    for name in value:
        if name not in (*STRUCTURES, "after_reasoning", "or_calls", "text_or_calls"):
            near = find_nearest_name(str(name), STRUCTURES)
            hint = f"did you mean {near}?" if near else f"known are {', '.join(STRUCTURES)}"
            raise RequestError(f"{PARAMETER} has no {shorten(name)!r}; {hint}", PARAMETER)
    return StructuredOutputsParams(**value)
