"""Ollama's own client, unchanged, against a server with the demo model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ollama
import pytest
from served import Served, serve
from tool_caller import serve_caller

KEY = "secret"
QUESTION = {"role": "user", "content": "What is 2 + 3?"}


def connect(server: Served, key: str = KEY) -> ollama.Client:
    headers = {"Authorization": f"Bearer {key}"}
    return ollama.Client(host=f"http://127.0.0.1:{server.port}", headers=headers)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serve("--num-pages", "256", key=KEY) as served:
        yield served


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[ollama.Client]:
    with connect(server) as client:
        yield client


@pytest.mark.feature("W20")
@pytest.mark.parametrize(
    ("question", "reason"), [("What is 2 + 3?", "stop"), ("Tell a story.", "length")]
)
def test_a_streamed_chat_is_the_whole_chat(
    client: ollama.Client, question: str, reason: str
) -> None:
    asked: dict[str, Any] = {"model": "demo", "options": {"num_predict": 20, "num_ctx": 2048}}
    messages = [{"role": "user", "content": question}]
    whole = client.chat(messages=messages, **asked)
    *parts, last = client.chat(messages=messages, stream=True, **asked)
    assert "".join(each.message.content or "" for each in parts) == whole.message.content
    assert whole.done_reason == last.done_reason == reason
    assert whole.eval_count == last.eval_count and (last.total_duration or 0) > 0
    text = client.generate(prompt=question, **asked).response
    assert text == whole.message.content


def test_models_are_listed_and_shown(client: ollama.Client) -> None:
    (model,) = client.list().models
    assert model.model == "demo" and (model.size or 0) > 0
    assert client.show("demo").capabilities == ["completion"]
    assert [each.context_length for each in client.ps().models] == [4096]
    vectors = client.embed("demo", ["a", "b"]).embeddings
    assert [len(each) for each in vectors] == [256, 256]


def test_errors_have_their_reason(client: ollama.Client, server: Served) -> None:
    with pytest.raises(ollama.ResponseError, match="served: demo") as missing:
        client.chat("llama3", [QUESTION])
    assert missing.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="images is not supported"):
        client.chat("demo", [QUESTION | {"images": [b"abc"]}])
    with connect(server, "wrong") as other, pytest.raises(ollama.ResponseError) as wrong:
        other.list()
    assert wrong.value.status_code == 401


@pytest.mark.feature("W20")
def test_a_function_is_called_and_its_result_taken(tmp_path: Path) -> None:
    def add(a: int) -> int:
        """Add.

        Args:
            a: A number.
        """
        return a + 3

    with serve_caller(tmp_path) as served, connect(served) as client:
        assert client.show("demo").capabilities == ["completion", "tools", "thinking"]
        first = client.chat("demo", [QUESTION], tools=[add], think=True).message
        (call,) = first.tool_calls or ()
        assert (first.thinking, first.content) == ("Hm.", "I add.")
        assert (call.function.name, call.function.arguments) == ("add", {"a": 2})
        result = {"role": "tool", "content": str(add(**call.function.arguments))}
        history = [QUESTION, first, result | {"tool_name": "add"}]
        parts = list(client.chat("demo", history, tools=[add], stream=True))
        assert "".join(each.message.thinking or "" for each in parts) == "Hm."
        assert [each.message.tool_calls for each in parts if each.message.tool_calls]
        plain = client.chat("demo", history, tools=[add], think=False).message
        assert plain.thinking is None and plain.content == "<think>Hm.</think>I add."
