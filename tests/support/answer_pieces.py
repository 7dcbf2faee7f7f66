"""The pieces of answers that models wrote, as a server gets them."""

from __future__ import annotations

from functools import partial

from headstock import SamplingParams
from headstock.outputs import CompletionOutput, Update
from headstock.text import Tokenizer
from headstock.text.answer import AnswerFormat
from headstock.text.completion import CompletionBuilder
from headstock.text.reasoning import MARKS
from headstock_tool_parsers.hermes import HermesParser

CALL = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
TEXT = f"<think>\nTwo and three.\n</think>\n\nSo: {CALL} and {CALL}{CALL}\nWait."
"""An answer with every kind of part, some of them several times."""


def build_pieces(tokenizer: Tokenizer, *groups: list[int], end: str) -> list[CompletionOutput]:
    """The pieces of an answer whose tokens come in these groups; the last piece is its end."""
    answer_format = AnswerFormat(reasoning=MARKS["think"], make_parser=partial(HermesParser, ()))
    builder = CompletionBuilder(0, SamplingParams(), tokenizer, answer_format)
    updates = [Update(id="0", tokens=tuple(group)) for group in groups]
    return [builder.apply_update(each) for each in (*updates, Update(id="0", finish_reason=end))]
