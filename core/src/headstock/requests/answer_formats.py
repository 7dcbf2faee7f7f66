"""How answers to a conversation are divided: by which tool parser, and by which marks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Final

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
from headstock.structured_outputs import ReasoningTokens, StructuredOutputsParams
from headstock.text.answer import AnswerFormat
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

    def make_format(
        self, conversation: Conversation, template: str, prompt: str, tokenizer: Tokenizer
    ) -> AnswerFormat | None:
        """The format of answers to a conversation that `template` has rendered as `prompt`, with
        the special tokens of `tokenizer`; None where nothing divides them.

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
        return evolve(
            plain,
            make_parser=partial(parser.make, tools),
            parser_label=parser.label,
            tool_names=frozenset(tool.name for tool in tools),
            special_tokens=(*plain.special_tokens, *parser.spec.special_tokens),
            allows_several=conversation.parallel_tool_calls is not False,
        )

    @staticmethod
    def delay_structure(
        outputs: StructuredOutputsParams, answer: AnswerFormat, tokenizer: Tokenizer
    ) -> tuple[StructuredOutputsParams, AnswerFormat]:
        """The structure, behind the reasoning of such answers, and how they are divided then.

        Where the marks of reasoning are no tokens the structure begins at once, without reasoning.
        """
        marks = answer.reasoning
        if marks is None or answer.first_state is ReasoningState.AFTER:
            return outputs, answer
        start, end = map(tokenizer.find_id, (marks.start, marks.end))
        if start is None or end is None:
            return outputs, evolve(answer, reasoning=None, first_state=ReasoningState.AFTER)
        is_inside = answer.first_state is ReasoningState.INSIDE
        reasoning = ReasoningTokens(start=None if is_inside else start, end=end)
        # Without the opening mark the answer is the structure, whatever its texts are.
        answer = evolve(answer, reasoning=evolve(marks, closes_alone=False))
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
            answers = render_sample_calls(tokenizer, template)
            parsers = map(self._select, TOOL_PARSERS if answers else ())
            self.by_template[template] = next(
                (parser for parser in parsers if _reads_any(parser, answers)), None
            )
            if len(self.by_template) > MAX_TEMPLATES:
                self.by_template.popitem(last=False)
        return self.by_template[template]

    def _select(self, name: str) -> SelectedToolParser:
        if name not in self.selected:
            self.selected[name] = select_tool_parser(name)
        return self.selected[name]


def _reads_any(parser: SelectedToolParser, answers: Sequence[str]) -> bool:
    """Whether the parser reads one of the answers as the sample call.   raises: PluginBroken"""
    try:
        return any(is_sample_call(parser.make([SAMPLE]), answer) for answer in answers)
    except PLUGIN_FAILURES as error:
        raise PluginBroken(
            f"{parser.label} failed: {describe_error(error)}; report it there"
        ) from error
