"""LangChain's ChatOpenAI, unchanged, against a server with the demo model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from served import Served, serve

CONVERSATION = [SystemMessage("You are kind."), HumanMessage("What is 2 + 3?")]


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    with serve("--num-pages", "256", key="secret") as server:
        yield connect(server)


def connect(server: Served) -> ChatOpenAI:
    return ChatOpenAI(
        model="demo",
        base_url=f"http://127.0.0.1:{server.port}/v1",
        api_key=server.key or "none",  # type: ignore[arg-type]
        temperature=0,
        max_retries=0,
    )


def test_a_chat_is_answered(model: Any) -> None:
    answer = model.invoke(CONVERSATION)
    assert isinstance(answer, AIMessage)
    assert answer.content == "5"
    assert answer.response_metadata["finish_reason"] == "stop"
    usage = answer.usage_metadata
    assert usage is not None and usage["output_tokens"] > 0
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def test_a_response_is_answered_and_streamed(model: Any) -> None:
    model = model.model_copy(update={"use_responses_api": True})
    assert model.invoke(CONVERSATION).text == "5"
    assert "".join(chunk.text for chunk in model.stream(CONVERSATION)) == "5"


def test_a_streamed_chat_is_the_whole_chat(model: Any) -> None:
    question = [HumanMessage("Tell a story about a girl.")]
    whole = model.bind(max_tokens=40).invoke(question)
    chunks = list(model.bind(max_tokens=40).stream(question))
    assert len(chunks) > 20
    assert "".join(str(chunk.content) for chunk in chunks) == whole.content


def test_several_chats_run_as_a_batch(model: Any) -> None:
    questions = [[HumanMessage(f"What is {a} + {a}?")] for a in range(2, 8)]
    together = [answer.content for answer in model.batch(questions)]
    assert together == [model.invoke(each).content for each in questions]


TEMPLATE = (
    "{% if tools %}{{ tools | tojson }} {% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>"
    "{% endfor %}\n{% endfor %}"
)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@pytest.mark.feature("W3")
@pytest.mark.parametrize("streams", [False, True])
def test_a_tool_is_called_and_its_answer_goes_back(tmp_path: Path, streams: bool) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text(TEMPLATE)
    # An engine that writes a call whatever it is asked: the demo model knows of no tools.
    script = {"text": f"I add.\n{CALL}", "stops": True, "interval": 0.0005}
    with serve("--chat-template", str(template), script=script) as server:
        model = connect(server).bind_tools([add])
        if streams:
            chunks = list(model.stream([HumanMessage("2 + 3?")]))
            answer: Any = sum(chunks[1:], start=chunks[0])
        else:
            answer = model.invoke([HumanMessage("2 + 3?")])
        (call,) = answer.tool_calls
        assert (call["name"], call["args"]) == ("add", {"a": 2, "b": 3})
        assert str(answer.content).strip() == "I add."
        assert answer.response_metadata["finish_reason"] == "tool_calls"
        result = add.invoke(call)
        assert (result.content, result.tool_call_id) == ("5", call["id"])
        turns = [HumanMessage("2 + 3?"), answer, result]
        assert model.invoke(turns).usage_metadata["input_tokens"] > 0  # type: ignore[index]
