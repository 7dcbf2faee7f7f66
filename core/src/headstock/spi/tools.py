"""Tool parsers: they find the calls of tools in an answer, piece by piece as it comes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import ClassVar

from attrs import field, frozen
from attrs.validators import deep_iterable, instance_of

from headstock.spi.plugin import PluginSpec


@frozen(kw_only=True)
class ToolParserSpec(PluginSpec):
    """A tool parser as its entry point returns it; `implementation` names a `ToolParser`.

    special_tokens: texts of special tokens that the parser must see, such as "[TOOL_CALLS]".
        Other special tokens are left out of an answer's text.
    """

    special_tokens: tuple[str, ...] = field(
        default=(), validator=deep_iterable(instance_of(str), instance_of(tuple))
    )


@frozen(kw_only=True)
class Tool:
    """A tool that a request offers.

    parameters: the JSON schema of its arguments, an object; empty when the request gives none
    """

    name: str
    parameters: Mapping[str, object]


@frozen(kw_only=True)
class WrittenCall:
    """How a model writes a call: `before`, the JSON object of its arguments, `after`.

    begin, end: what stands around all calls of an answer
    separator: what stands between two calls; None where an answer has one call at most
    """

    before: str
    after: str
    begin: str = ""
    end: str = ""
    separator: str | None = None


class ToolEventKind(Enum):
    """What a piece of an answer is.

    CONTENT: text for the reader
    CALL: a call begins; the text is the whole name of its tool
    ARGUMENTS: text of the JSON object with the call's arguments
    END: the call is complete
    """

    CONTENT = "content"
    CALL = "call"
    ARGUMENTS = "arguments"
    END = "end"


@frozen
class ToolEvent:
    """A piece of an answer. Those between a CALL and its END are ARGUMENTS."""

    kind: ToolEventKind
    text: str = ""


class ToolParser(ABC):
    """Reads one answer, made with the tools that its request offers: `ToolParser(tools)`.

    How an answer is cut into pieces changes nothing but how the texts of its events are cut. Text
    that turns out to be no call is content, every character of it. A call that the answer breaks
    off in has no END.

    call_openings: what calls begin with, such as "<tool_call>" and a line break. Where one of them
        stands on its own line in unclosed reasoning, a call begins. One without a
        line break at its end must begin the line.
    call_marks: texts such as "<tool_call>". An answer without any of them has no call. With none,
        the parser makes no such promise.
    call_starts: texts such as "{" with which calls also begin, where an answer begins with them,
        after white space.
    """

    call_openings: ClassVar[tuple[str, ...]] = ()
    call_marks: ClassVar[tuple[str, ...]] = ()
    call_starts: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def feed(self, text: str) -> Sequence[ToolEvent]:
        """The events that `text`, the next piece of the answer, makes certain."""

    @abstractmethod
    def finish(self) -> Sequence[ToolEvent]:
        """The events of what was held back, when no more text follows."""

    def write_call(self, name: str) -> Sequence[WrittenCall]:
        """The forms of an answer that is a call of this tool, for grammars; the parser reads each
        as that call. Core takes the one that the chat template writes, or else the first. None
        where the arguments are not one JSON object.
        """
        return ()
