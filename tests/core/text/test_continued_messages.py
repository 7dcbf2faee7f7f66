"""Answers that continue the last message: what may be continued, and in which part."""

from __future__ import annotations

from typing import Any

import pytest

from headstock import SamplingParams
from headstock.errors import RequestError
from headstock.text.tokenizer import Tokenizer

from .test_chat_answers import TALK, TEMPLATE, Make, parts, says

CONTINUED: Any = {"add_generation_prompt": False, "continue_final_message": True}


@pytest.mark.feature("W4")
@pytest.mark.parametrize(
    ("begun", "reasoning", "text"),
    [
        ("<think>One,", " two", "5"),
        ("<think>One</think>Or <think>", " two", "5"),
        ("<think>One</think>It is", None, " two</think>5"),
        ("It is", None, " two</think>5"),
    ],
)
def test_reasoning_that_a_message_leaves_open_goes_on(
    scripted: Make, tokenizer: Tokenizer, begun: str, reasoning: str | None, text: str
) -> None:
    llm, _ = scripted(script=says(tokenizer, " two</think>5"))
    talk = [*TALK, {"role": "assistant", "content": begun}]
    options = CONTINUED | {"chat_template": TEMPLATE, "split_answers": True}
    (output,) = llm.chat(talk, SamplingParams(max_tokens=200), **options)
    assert parts(output.outputs[0])[:2] == (reasoning, text)


def test_a_message_that_the_template_changes_cannot_be_continued(scripted: Make) -> None:
    llm, _ = scripted()
    talk = [*TALK, {"role": "assistant", "content": "<think>One</think>It is"}]
    # As templates do that leave the reasoning of earlier turns out.
    template = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
    with pytest.raises(RequestError, match="the chat template changes the last message") as caught:
        llm.chat(talk, chat_template=template, **CONTINUED)
    assert caught.value.parameter == "continue_final_message"
