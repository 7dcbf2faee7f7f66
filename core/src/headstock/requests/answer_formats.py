"""How answers to a conversation are divided: by which tool parser, and by which marks."""

from __future__ import annotations

from functools import partial

from attrs import evolve

from headstock.errors import HeadstockError, RequestError
from headstock.selection.tool_parsers import (
    SelectedToolParser,
    find_auto_parser,
    select_tool_parser,
)
from headstock.structured_outputs import ReasoningTokens, StructuredOutputsParams
from headstock.text.answer import AnswerFormat
from headstock.text.conversation import Conversation
from headstock.text.forced_call import ForcedCallParser
from headstock.text.reasoning import ReasoningState, find_first_state, find_marks
from headstock.text.tokenizer import Tokenizer
from headstock.text.tools import list_tools


class AnswerFormats:
    """Makes formats of answers, with the parsers of `--tool-parser` and `--reasoning-parser`."""

    def __init__(self, tool_parser: str = "auto", reasoning_parser: str = "auto") -> None:
        self.tool_parser = tool_parser
        self.reasoning_parser = reasoning_parser
        # Listing what is installed takes longer than most of a request.
        self.selected: dict[str, SelectedToolParser] = {}

    def make_format(
        self, conversation: Conversation, template: str, prompt: str
    ) -> AnswerFormat | None:
        """The format of answers to a conversation that `template` has rendered as `prompt`; None
        where nothing divides them.

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
        parser = self._select_tool_parser(template)
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

    def _select_tool_parser(self, template: str) -> SelectedToolParser:
        """The parser of the setting, or else of the template.   raises: RequestError"""
        name = find_auto_parser(template) if self.tool_parser == "auto" else self.tool_parser
        if name in ("", "off"):
            reason = "--tool-parser is off" if name else "its chat template has no known format"
            raise RequestError(
                f"tools are not supported with this model: {reason}; choose with --tool-parser, "
                "or leave tools out",
                "tools",
            )
        if name not in self.selected:
            try:
                self.selected[name] = select_tool_parser(name)
            except HeadstockError as error:
                raise RequestError(f"tools are not supported here: {error}", "tools") from error
        return self.selected[name]
