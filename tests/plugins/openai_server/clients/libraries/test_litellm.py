"""litellm, unchanged, against a server with the demo model, by each API that both know."""

from __future__ import annotations

import os
from typing import Any, Literal

import pydantic
import pytest
from served import Served

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or importing it asks the network
import litellm

# The library leaves connections open, and imports more of itself, which warns, at its first call.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
QUESTION = [{"role": "user", "content": "What is 2 + 3?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "find_weather",
        "parameters": {
            "type": "object",
            "properties": {"town": {"enum": ["Oslo"]}},
            "required": ["town"],
        },
    },
}


class Sum(pydantic.BaseModel):
    """The form of an answer."""

    sum: Literal[4, 5]


@pytest.mark.feature("W1")
@pytest.mark.parametrize(
    ("model", "path"),
    [
        ("openai/demo", "/v1"),
        ("hosted_vllm/demo", "/v1"),
        ("ollama_chat/demo", ""),
        ("anthropic/demo", ""),
    ],
)
def test_a_chat_is_answered_and_streamed(chooser: Served, model: str, path: str) -> None:
    address = f"http://127.0.0.1:{chooser.port}{path}"
    asked: Any = {"model": model, "api_base": address, "api_key": chooser.key, "temperature": 0}
    whole = litellm.completion(messages=QUESTION, **asked)
    assert whole.choices[0].message.content == "5"
    chunks = litellm.completion(messages=QUESTION, stream=True, **asked)
    assert "".join(each.choices[0].delta.content or "" for each in chunks) == "5"


@pytest.mark.feature("W3", "W5")
def test_a_schema_and_tools_come_together(chooser: Served, base_url: str) -> None:
    asked: Any = {"model": "openai/demo", "api_base": base_url, "api_key": chooser.key}
    for start in ("<", "{"):
        (token,) = chooser.post("/tokenize", {"prompt": start}).json["tokens"]
        message = (
            litellm.completion(
                messages=QUESTION,
                tools=[TOOL],
                response_format=Sum,
                logit_bias={str(token): 100},
                max_tokens=90,
                temperature=0,
                parallel_tool_calls=False,
                **asked,
            )
            .choices[0]
            .message
        )
        if start == "<":
            (call,) = message.tool_calls
            assert (call.function.name, call.function.arguments) == (
                "find_weather",
                '{"town":"Oslo"}',
            )
        else:
            Sum.model_validate_json(message.content)
