"""The structure that the answer to a conversation must have, because of its tools too."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from attrs import evolve

from headstock.requests.answer_formats import AnswerFormats
from headstock.requests.closed_objects import close_tool
from headstock.sampling_params import SamplingParams
from headstock.spi import Tool
from headstock.text.call_or_answer import CallForms
from headstock.text.conversation import Conversation
from headstock.text.forced_call import force_call
from headstock.text.tokenizer import Tokenizer
from headstock.text.tools import list_strict_names, list_tools

NO_ARGUMENTS: Final = MappingProxyType({"type": "object", "additionalProperties": False})


def rule_answer(
    formats: AnswerFormats,
    conversation: Conversation,
    params: SamplingParams,
    template: str,
    tokenizer: Tokenizer,
    *,
    open_objects: bool,
) -> tuple[SamplingParams, CallForms | None]:
    """The parameters with the structure of the answer, if it must have one; how calls are written,
    where the answer is either calls or JSON of a schema.

    open_objects: whether schemas mean what the letter of JSON Schema says
    raises: RequestError
    """

    def close(tools: list[Tool]) -> list[Tool]:
        return tools if open_objects else [close_tool(tool) for tool in tools]

    if conversation.forced_tools:
        return force_call(params, close(conversation.forced_tools)), None
    tools = list_tools(conversation.offered_tools)
    if tools and params.structured_outputs is not None:
        both, forms = formats.allow_calls(
            params.structured_outputs, conversation, template, tokenizer, close(tools)
        )
        return params.replace({"structured_outputs": both}), forms
    strict = list_strict_names(conversation.offered_tools)
    if strict:
        # A strict tool without a schema takes no arguments; those of the others are any object.
        ruled = [
            evolve(
                each, parameters=(each.parameters or NO_ARGUMENTS) if each.name in strict else {}
            )
            for each in tools
        ]
        calls = formats.rule_calls(conversation, template, tokenizer, close(ruled))
        return params.replace({"structured_outputs": calls}), None
    return params, None
