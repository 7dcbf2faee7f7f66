"""pydantic-ai, unchanged, against a server with the demo model, by both of OpenAI's APIs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal

import pydantic
import pytest
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from served import Served

# The library leaves connections open.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
Connect = Callable[[], Any]


class Sum(pydantic.BaseModel):
    """The form of an answer."""

    sum: Literal[4, 5]


@pytest.fixture(params=[OpenAIChatModel, OpenAIResponsesModel])
def connect(request: pytest.FixtureRequest, base_url: str, chooser: Served) -> Connect:
    """Makes the model; each run of an agent has an event loop of its own, and so a client."""
    return lambda: request.param(
        "demo", provider=OpenAIProvider(base_url=base_url, api_key=chooser.key)
    )


@pytest.mark.feature("W1", "W16")
def test_an_agent_answers_and_streams(connect: Connect) -> None:
    assert Agent(connect()).run_sync("What is 2 + 3?").output == "5"

    async def stream() -> str:
        async with Agent(connect()).run_stream("What is 2 + 3?") as run:
            return "".join([part async for part in run.stream_text(delta=True)])

    assert asyncio.run(stream()) == "5"


@pytest.mark.feature("W3", "W5")
@pytest.mark.parametrize("form", [Sum, NativeOutput(Sum)], ids=["tool", "schema"])
def test_an_output_and_tools_come_together(connect: Connect, form: Any) -> None:
    towns = []

    def find_weather(town: Literal["Oslo", "Bergen"]) -> str:
        """Find the weather."""
        towns.append(town)
        return "rain"

    for seed in range(8):
        settings: Any = {"max_tokens": 90, "temperature": 1.5, "extra_body": {"seed": seed}}
        agent: Any = Agent(
            connect(), output_type=form, tools=[find_weather], model_settings=settings
        )
        assert isinstance(agent.run_sync("What is 2 + 3?").output, Sum)
    assert set(towns) <= {"Oslo", "Bergen"} and towns
