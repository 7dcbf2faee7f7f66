"""What a chat template reads of chat_template_kwargs, and what becomes of the rest."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from headstock import LLM
from headstock.errors import RequestError
from headstock.text.template_variables import MAX_NOTICES, UnreadNotices, list_variables

HELLO = [{"role": "user", "content": "hello"}]
TEMPLATE = "{{ messages[0].content }}{% if enable_thinking %}!{% endif %}"
Make = Callable[..., tuple[LLM, Any]]


@pytest.mark.parametrize(
    ("template", "variables"),
    [
        ("{% if a is not defined %}{% set a = true %}{% endif %}{{ a }}", {"a"}),
        ("{% set a = a | default(1) %}{{ a }}", {"a"}),
        ("{% set a = 1 %}{{ a }}", set()),
        ("{% macro f(b) %}{{ a }}{{ b }}{% endmacro %}{{ f(1) }}", {"a"}),
        ("{% set ns = namespace(x=0) %}{% set ns.x = a %}{{ ns.x }}", {"a"}),
        ("{# a #}{{ 'a' }}{% generation %}{{ b }}{% endgeneration %}", {"b"}),
        ("{% for a in range(3) %}{% if a %}{% continue %}{% endif %}{{ a }}{% endfor %}", set()),
        ("{{ a", None),
        ("{{ a | no_such_filter }}", None),
        ("{{ " + "(" * 5000 + "a" + ")" * 5000 + " }}", None),
    ],
)
def test_the_variables_of_a_template_are_those_that_it_reads(
    template: str, variables: set[str] | None
) -> None:
    assert list_variables(template) == variables


@pytest.mark.parametrize("slip", ["enable_thinkng", "enable_thinking_", "Enable_Thinking"])
def test_a_slip_for_a_variable_is_refused(scripted: Make, slip: str) -> None:
    llm, loop = scripted(chat_template=TEMPLATE)
    with pytest.raises(
        RequestError, match=f"has {slip}, which the .* did you mean enable_thinking"
    ) as caught:
        llm.chat(HELLO, chat_template_kwargs={slip: False})
    assert caught.value.parameter == "chat_template_kwargs"
    assert loop.seen == []


def test_a_variable_for_other_models_is_said_once_and_changes_nothing(
    scripted: Make, caplog: pytest.LogCaptureFixture
) -> None:
    llm, loop = scripted(chat_template=TEMPLATE)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            # Some clients send both spellings.
            llm.chat(HELLO, chat_template_kwargs={"enable_thinking": True, "thinking": True})
            llm.chat(HELLO, chat_template_kwargs={"custom_tone": "dry"})
    lines = [record.getMessage() for record in caplog.records]
    assert [line.rpartition("variable=")[2] for line in lines] == ["thinking", "custom_tone"]
    assert len(loop.seen) == 4


def test_the_number_of_notices_has_a_limit(caplog: pytest.LogCaptureFixture) -> None:
    notices = UnreadNotices()
    notices.say((f"unread{'x' * index}" for index in range(MAX_NOTICES + 9)), TEMPLATE)
    assert len(caplog.records) == MAX_NOTICES


def test_what_is_in_a_comment_alone_is_no_reasoning_effort(scripted: Make) -> None:
    llm, _ = scripted(chat_template=TEMPLATE + "{# reasoning_effort #}")
    with pytest.raises(RequestError, match="reasoning_effort is not supported"):
        llm.chat(HELLO, reasoning_effort="low")
