"""How answers to a conversation are divided: by which tool parser, and by which marks."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from attrs import evolve

from headstock.errors import (
    PLUGIN_FAILURES,
    HeadstockError,
    PluginBroken,
    RequestError,
    describe_error,
)
from headstock.selection.auto_choices import TOOL_PARSERS
from headstock.selection.tool_parsers import SelectedToolParser, select_tool_parser
from headstock.spi import Tool, ToolParser
from headstock.structured_outputs import ReasoningTokens, StructuredOutputsParams
from headstock.text.answer import AnswerFormat
from headstock.text.call_or_answer import CallForms, CallOrAnswerParser
from headstock.text.conversation import Conversation
from headstock.text.forced_call import ForcedCallParser
from headstock.text.reasoning import ReasoningState, find_first_state, find_marks
from headstock.text.template_calls import SAMPLE, is_sample_call, render_sample_calls
from headstock.text.tokenizer import Tokenizer
from headstock.text.tools import list_tools

MAX_TEMPLATES: Final = 64
"""Chat templates whose parsers are remembered; a request may bring its own."""


class AnswerFormats:
    """Makes formats of answers, with the parsers of `--tool-parser` and `--reasoning-parser`."""

    def __init__(self, tool_parser: str = "auto", reasoning_parser: str = "auto") -> None:
        self.tool_parser = tool_parser
        self.reasoning_parser = reasoning_parser
        # Listing what is installed takes longer than most of a request.
        self.selected: dict[str, SelectedToolParser] = {}
        self.by_template: OrderedDict[str, SelectedToolParser | None] = OrderedDict()
        self.samples: OrderedDict[str, list[str]] = OrderedDict()

    def make_format(
        self,
        conversation: Conversation,
        template: str,
        prompt: str,
        tokenizer: Tokenizer,
        forms: CallForms | None = None,
    ) -> AnswerFormat | None:
        """The format of answers to a conversation that `template` has rendered as `prompt`, with
        the special tokens of `tokenizer`; None where nothing divides them.

        forms: how calls are written, where an answer is either calls or follows a structure
        raises: RequestError for tools whose calls nothing would find; it names settings by flags
        """
        marks = find_marks(self.reasoning_parser, template)
        plain = AnswerFormat(
            reasoning=marks,
            first_state=ReasoningState.AFTER
            if marks is None
            else find_first_state(prompt, marks, conversation.begun_text),
            special_tokens=() if marks is None else (marks.start, marks.end),
        )
        forced = conversation.forced_tools
        if forced:
            return evolve(
                plain,
                make_parser=partial(ForcedCallParser, forced),
                parser_label="the call's reader",
            )
        tools = list_tools(conversation.offered_tools)
        if not tools:
            return None if marks is None else plain
        parser = self._select_tool_parser(template, tokenizer)
        make_parser: Callable[[], ToolParser] = partial(parser.make, tools)
        if forms is not None:
            make_parser = partial(_make_divided, make_parser, forms.signs)
        return evolve(
            plain,
            make_parser=make_parser,
            parser_label=parser.label,
            tool_names=frozenset(tool.name for tool in tools),
            special_tokens=(*plain.special_tokens, *parser.spec.special_tokens),
            allows_several=conversation.parallel_tool_calls is not False,
        )

    def allow_calls(
        self,
        outputs: StructuredOutputsParams,
        conversation: Conversation,
        template: str,
        tokenizer: Tokenizer,
        tools: Sequence[Tool],
    ) -> tuple[StructuredOutputsParams, CallForms]:
        """The structure of an answer that may be calls of these tools instead, and how those are
        written.

        tools: with the schemas that arguments must follow
        raises: RequestError where an answer may look like a call
        """
        if not outputs.schema:
            raise RequestError(
                "structured_outputs can only be combined with tools where they are JSON: other "
                'texts may look like calls; give tool_choice "none" or leave one of the two out',
                "structured_outputs",
            )
        parser = self._select_tool_parser(template, tokenizer)
        with _blame_parser(parser.label):
            forms = CallForms(parser.make, tools, self._list_samples(template, tokenizer))
            calls = forms.write_grammar(
                _find_tokens(parser, tokenizer),
                allows_several=conversation.parallel_tool_calls is not False,
            )
        forms.check_apart(json.loads(outputs.schema))
        return evolve(outputs, or_calls=calls), forms

    def rule_calls(
        self,
        conversation: Conversation,
        template: str,
        tokenizer: Tokenizer,
        tools: Sequence[Tool],
    ) -> StructuredOutputsParams:
        """The structure of an answer that is text, or calls of these tools behind text.

        tools: with the schemas that arguments must follow
        raises: RequestError where nothing tells calls from text
        """
        parser = self._select_tool_parser(template, tokenizer)
        marks = find_marks(self.reasoning_parser, template)
        with _blame_parser(parser.label):
            samples = self._list_samples(template, tokenizer)
            forms = CallForms(parser.make, tools, samples, refuse_strict)
            calls: Any = forms.write_text_grammar(
                _find_tokens(parser, tokenizer),
                allows_several=conversation.parallel_tool_calls is not False,
                refuse=refuse_strict,
                # Behind marks of reasoning within the text, an answer would begin once more.
                without=(marks.start, marks.end) if marks and forms.call_starts else (),
            )
        return StructuredOutputsParams(text_or_calls=calls)

    def delay_structure(
        self, outputs: StructuredOutputsParams, answer: AnswerFormat, tokenizer: Tokenizer
    ) -> tuple[StructuredOutputsParams, AnswerFormat]:
        """The structure, behind the reasoning of such answers, and how they are divided then.

        If the marks of reasoning are not tokens, the structure begins at once, without reasoning.
        Text may have such marks, and then strict tools begin at once with reasoning.
        """
        marks = answer.reasoning
        if marks is None or answer.first_state is ReasoningState.AFTER:
            return outputs, answer
        start, end = map(tokenizer.find_id, (marks.start, marks.end))
        mark = outputs.call_mark
        if start is None or end is None:
            if mark:
                return outputs, answer
            return outputs, evolve(answer, reasoning=None, first_state=ReasoningState.AFTER)
        is_inside = answer.first_state is ReasoningState.INSIDE
        # With this token a call would begin that no grammar rules. The other marks that begin it
        # are text there.
        without = tuple(each["token"] for each in mark if "token" in each)
        reasoning = ReasoningTokens(start=None if is_inside else start, end=end, without=without)
        # Without the opening mark the answer is the structure, whatever its texts are.
        answer = evolve(
            answer,
            reasoning=evolve(marks, closes_alone=False),
            finds_reasoned_calls=outputs.text_or_calls is None,
        )
        return evolve(outputs, after_reasoning=reasoning), answer

    def _select_tool_parser(self, template: str, tokenizer: Tokenizer) -> SelectedToolParser:
        """The parser of the setting, or else of the template.   raises: RequestError"""
        try:
            parser = (
                self._find_auto_parser(template, tokenizer)
                if self.tool_parser == "auto"
                else None
                if self.tool_parser == "off"
                else self._select(self.tool_parser)
            )
        except HeadstockError as error:
            raise RequestError(f"tools are not supported here: {error}", "tools") from error
        if parser is None:
            is_off = self.tool_parser == "off"
            reason = (
                ("tool_parser (--tool-parser) is off")
                if is_off
                else "its chat template has no known format"
            )
            raise RequestError(
                f"tools are not supported with this model: {reason}; choose with tool_parser "
                "(--tool-parser), or leave tools out",
                "tools",
            )
        return parser

    def _find_auto_parser(self, template: str, tokenizer: Tokenizer) -> SelectedToolParser | None:
        """The parser that reads the calls of this template, if any.   raises: HeadstockError"""
        if template not in self.by_template:
            answers = self._list_samples(template, tokenizer)
            parsers = map(self._select, TOOL_PARSERS if answers else ())
            self.by_template[template] = next(
                (parser for parser in parsers if _reads_any(parser, answers)), None
            )
            if len(self.by_template) > MAX_TEMPLATES:
                self.by_template.popitem(last=False)
        return self.by_template[template]

    def _list_samples(self, template: str, tokenizer: Tokenizer) -> list[str]:
        """What the template writes as a sample call, if anything."""
        if template not in self.samples:
            self.samples[template] = render_sample_calls(tokenizer, template)
            if len(self.samples) > MAX_TEMPLATES:
                self.samples.popitem(last=False)
        return self.samples[template]

    def _select(self, name: str) -> SelectedToolParser:
        if name not in self.selected:
            self.selected[name] = select_tool_parser(name)
        return self.selected[name]


def refuse_strict(reason: str) -> RequestError:
    """The error for strict tools that cannot be had for the reason."""
    return RequestError(f"tools: strict is not supported here: {reason}; leave strict out", "tools")


@contextmanager
def _blame_parser(label: str) -> Iterator[None]:
    """Make what a parser raises an error of the request that names it."""
    try:
        yield
    except RequestError:
        raise
    except PLUGIN_FAILURES as error:
        raise RequestError(
            f"tools are not supported here: {label} failed: {describe_error(error)}; "
            "report it there",
            "tools",
        ) from error


def _find_tokens(parser: SelectedToolParser, tokenizer: Tokenizer) -> dict[str, int]:
    """The special tokens of a parser that the tokenizer has."""
    tokens = {mark: tokenizer.find_id(mark) for mark in parser.spec.special_tokens}
    return {mark: token for mark, token in tokens.items() if token is not None}


def _make_divided(make_parser: Callable[[], ToolParser], signs: Sequence[str]) -> ToolParser:
    return CallOrAnswerParser(make_parser(), signs)


def _reads_any(parser: SelectedToolParser, answers: Sequence[str]) -> bool:
    """Whether the parser reads one of the answers as the sample call.   raises: PluginBroken"""
    try:
        return any(is_sample_call(parser.make([SAMPLE]), answer) for answer in answers)
    except PLUGIN_FAILURES as error:
        raise PluginBroken(
            f"{parser.label} failed: {describe_error(error)}; report it there"
        ) from error
