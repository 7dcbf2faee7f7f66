"""Grammars of answers with calls of tools, written as Lark rules."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headstock_llguidance.dates import hold_to_calendar

_ANY = r"/(?s:.*)/"
_BLANKS = r"/[ \t\r\n]*/"

Segments = Sequence[Mapping[str, Any]]


class CallRules:
    """Writes the rules.   has_whitespace: whether JSON may have white space between its tokens"""

    def __init__(self, *, has_whitespace: bool) -> None:
        self.has_whitespace = has_whitespace

    def write_json_or_calls(self, parts: Mapping[str, Any]) -> str:
        """Write what `GrammarKind.JSON_OR_CALLS` says."""
        answer = _write_json(parts["json"], {"whitespace_flexible": self.has_whitespace})
        options = {"whitespace_flexible": self.has_whitespace}
        return "\n".join(
            ("start: answer | calls", f"answer: {answer}", *_write_calls(parts, options))
        )

    def write_text_or_calls(self, parts: Mapping[str, Any]) -> str:
        """Write what `GrammarKind.TEXT_OR_CALLS` says."""
        options: dict[str, Any] = {"whitespace_flexible": self.has_whitespace}
        if not self.has_whitespace:
            # Chat templates write these blanks, and so do models.
            options |= {"item_separator": ", ?", "key_separator": ": ?"}
        refused = {
            **{text: f"{_ANY} {_write_text(text)} {_ANY}" for text in parts["without"]},
            **{text: f"{_BLANKS} {_write_text(text)} {_ANY}" for text in parts["not_first"]},
        }
        names = {text: f"NOT_{number}" for number, text in enumerate(refused)}
        lines = [
            "TEXT: /(?s:.+)/" + _exclude(names.values()),
            *(f"{names[text]}: {pattern}" for text, pattern in refused.items()),
        ]
        match list(parts["mark"]):
            case []:
                head = "BLANKS?"
                lines.append("BLANKS: /[ \\t\\r\\n]+/")
            case [{"text": str(mark)}]:
                # A lexeme of text goes on as long as it can, and so never ends before a mark. One
                # of both ends with the first mark.
                head = "text_and_mark"
                others = [name for text, name in names.items() if text != mark]
                lines += [
                    "text_and_mark[lazy]: MARK | TEXT_AND_MARK",
                    f"MARK: {_BLANKS} {_write_text(mark)}",
                    f"TEXT_AND_MARK: MARKED{_exclude(others)}",
                    f"MARKED: {_ANY} {_write_text(mark)}",
                ]
            case segments:
                head = f"TEXT? {_write_segments(segments, options)}"
        return "\n".join((f"start: TEXT? | {head} calls", *_write_calls(parts, options), *lines))


def _write_calls(parts: Mapping[str, Any], options: Mapping[str, Any]) -> Iterable[str]:
    """Write the rule `calls`, and those that it needs."""

    def write(name: str) -> str:
        return _write_segments(parts[name], options)

    several = "" if parts["separator"] is None else f"({write('separator')} call)*"
    return (
        f"calls: {write('begin')} call {several} {write('end')}",
        f"call: {' | '.join(f'call_{number}' for number, _ in enumerate(parts['calls']))}",
        *(
            f"call_{number}: {_write_segments(segments, options)}"
            for number, segments in enumerate(parts["calls"])
        ),
    )


def _exclude(names: Iterable[str]) -> str:
    """Write that a terminal is none of these."""
    return "".join(f" & ~{name}" for name in names)


def _write_segments(segments: Segments, options: Mapping[str, Any]) -> str:
    return " ".join(_write_segment(segment, options) for segment in segments)


def _write_segment(segment: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    if "token" in segment:
        return f"<[{segment['token']}]>"
    if "text" in segment:
        return _write_text(segment["text"])
    return _write_json(segment["json"], options)


def _write_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _write_json(schema: Mapping[str, Any] | bool, options: Mapping[str, Any]) -> str:
    """Write JSON of a schema as part of a rule."""
    schema = {True: {}, False: {"enum": []}}[schema] if isinstance(schema, bool) else schema
    held = {**hold_to_calendar(schema), "x-guidance": options}
    return f"%json {json.dumps(held, ensure_ascii=False)}"
