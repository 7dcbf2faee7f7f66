"""LlamaIndex's model of OpenAI-like servers, unchanged, against one with the demo model."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pydantic
import pytest
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from served import Served

# The library leaves connections open, and asks pydantic in a way that is deprecated.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
QUESTION = "What is 2 + 3?"


class Sum(pydantic.BaseModel):
    """The form of an answer."""

    sum: Literal[4, 5]


class Place(pydantic.BaseModel):
    """Arguments of a tool."""

    town: Literal["Oslo", "Bergen"]


def find_weather(town: str) -> str:
    """Find the weather."""
    return f"rain in {town}"


@pytest.fixture(scope="module")
def model(chooser: Served, base_url: str) -> Any:
    return OpenAILike(
        model="demo",
        api_base=base_url,
        api_key=chooser.key,
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=4096,
        max_tokens=90,
        temperature=0,
        max_retries=0,
    )


@pytest.mark.feature("W1")
def test_prompts_and_chats_are_answered_and_streamed(model: Any) -> None:
    messages = [ChatMessage(role="user", content=QUESTION)]
    assert model.complete(QUESTION).text == model.chat(messages).message.content == "5"
    assert "".join(each.delta or "" for each in model.stream_chat(messages)) == "5"


@pytest.mark.feature("W3", "W5")
def test_models_are_read_and_tools_called(model: Any) -> None:
    for uses_schema in (False, True):
        asked = model.model_copy(update={"should_use_structured_outputs": uses_schema})
        assert isinstance(asked.as_structured_llm(Sum).complete(QUESTION).raw, Sum)
    tool = FunctionTool.from_defaults(find_weather, fn_schema=Place)
    answer = model.chat_with_tools([tool], QUESTION, tool_required=True)
    calls = model.get_tool_calls_from_response(answer)
    assert calls and all(each.tool_name == "find_weather" for each in calls)

    async def run() -> Any:
        return await FunctionAgent(tools=[tool], llm=model).run(QUESTION, max_iterations=5)

    assert str(asyncio.run(run()))
