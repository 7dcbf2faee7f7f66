"""OpenAI's agents, unchanged, against a server with the demo model, by both of its APIs."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import agents
import openai
import pydantic
import pytest
from served import Served

# The library leaves connections open.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
UNTRACED = agents.RunConfig(tracing_disabled=True)  # traces would go to OpenAI


class Sum(pydantic.BaseModel):
    """The form of an answer."""

    sum: Literal[4, 5]


@pytest.fixture(params=[agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel])
def model(request: pytest.FixtureRequest, base_url: str, chooser: Served) -> Any:
    client = openai.AsyncOpenAI(base_url=base_url, api_key=chooser.key, max_retries=0)
    return request.param(model="demo", openai_client=client)


@pytest.mark.feature("W1", "W16")
def test_an_agent_streams_its_answer(model: Any) -> None:
    agent = agents.Agent(name="a", model=model)

    async def stream() -> tuple[str, str]:
        run = agents.Runner.run_streamed(agent, "What is 2 + 3?", run_config=UNTRACED)
        events = [event async for event in run.stream_events()]
        raw = [event.data for event in events if event.type == "raw_response_event"]
        deltas = [each.delta for each in raw if each.type == "response.output_text.delta"]
        return "".join(deltas), run.final_output

    assert asyncio.run(stream()) == ("5", "5")


@pytest.mark.feature("W3", "W5")
def test_an_agent_calls_a_tool_before_its_output(model: Any) -> None:
    towns = []

    @agents.function_tool
    def find_weather(town: Literal["Oslo", "Bergen"]) -> str:
        """Find the weather."""
        towns.append(town)
        return "rain"

    # Agents require a call of their first turn alone: the output comes where they leave it open.
    settings = agents.ModelSettings(
        tool_choice="required", max_tokens=90, temperature=1.5, extra_body={"seed": 1}
    )
    agent = agents.Agent(
        name="a", model=model, tools=[find_weather], output_type=Sum, model_settings=settings
    )
    run = agents.Runner.run(agent, "What is 2 + 3?", max_turns=50, run_config=UNTRACED)
    assert isinstance(asyncio.run(run).final_output, Sum)
    assert towns and set(towns) <= {"Oslo", "Bergen"}
