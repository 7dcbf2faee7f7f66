"""OpenAI's own client, unchanged, against a server with the demo model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest
from chat_templates import HERMES_CALLS
from served import Served, serve
from tool_caller import serve_caller

KEY = "secret"
QUESTION: list[Any] = [{"role": "user", "content": "What is 2 + 3?"}]
STORY = "Once upon a time"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serve("--num-pages", "256", key=KEY) as served:
        yield served


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url(server), api_key=KEY, max_retries=0) as client:
        yield client


def url(server: Served) -> str:
    return f"http://127.0.0.1:{server.port}/v1"


def test_the_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").owned_by == "headstock"
    with pytest.raises(openai.NotFoundError, match="served: demo"):
        client.models.retrieve("other")


@pytest.mark.feature("W1")
@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 40},
        {"max_completion_tokens": 30, "temperature": 1.2, "seed": 7, "n": 3},
        {"max_tokens": 60, "stop": ["girl"], "frequency_penalty": 0.5},
        {"max_tokens": 12, "logprobs": True, "top_logprobs": 2, "extra_body": {"top_k": 5}},
    ],
    ids=str,
)
def test_a_streamed_chat_is_the_whole_chat(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    messages: Any = [{"role": "user", "content": "Tell a story about a girl."}]
    whole = client.chat.completions.create(model="demo", messages=messages, **fields)
    texts, reasons, logprobs = {}, {}, {}
    usage = None
    for chunk in client.chat.completions.create(
        model="demo",
        messages=messages,
        stream=True,
        stream_options={"include_usage": True},
        **fields,
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            reasons[choice.index] = choice.finish_reason
            if choice.logprobs:
                logprobs.setdefault(choice.index, []).extend(choice.logprobs.content or [])
    assert len(whole.choices) == fields.get("n", 1)
    for choice in whole.choices:
        assert texts[choice.index] == choice.message.content
        assert reasons[choice.index] == choice.finish_reason
        if "logprobs" in fields:
            content = choice.logprobs.content
            assert [each.token for each in logprobs[0]] == [each.token for each in content]
            assert all(len(each.top_logprobs) == 2 for each in content)
    assert usage is not None and whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens


def test_the_streaming_helper_gives_the_final_message(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="demo", messages=QUESTION) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "5"
    assert final.choices[0].finish_reason == "stop"
    assert {"chunk", "content.delta", "content.done"} <= kinds


def test_a_streamed_completion_is_the_whole_completion(client: openai.OpenAI) -> None:
    prompts: Any = [STORY, "23 + 48 ="]
    fields: Any = {"model": "demo", "prompt": prompts, "max_tokens": 10, "echo": True}
    whole = client.completions.create(**fields, logprobs=1)
    texts = {0: "", 1: ""}
    for chunk in client.completions.create(**fields, logprobs=1, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert [choice.text for choice in whole.choices] == [texts[0], texts[1]]
    assert whole.choices[1].text.startswith("23 + 48 = 71")
    assert whole.choices[0].logprobs.token_logprobs[0] is None


@pytest.mark.parametrize(
    ("question", "status"), [("What is 2 + 3?", "completed"), ("Tell a story.", "incomplete")]
)
@pytest.mark.feature("W16")
def test_a_streamed_response_is_the_whole_response(
    client: openai.OpenAI, question: str, status: str
) -> None:
    asked: dict[str, Any] = {"model": "demo", "input": question, "instructions": "Be kind."}
    fields: dict[str, Any] = {"max_output_tokens": 20, "metadata": {"a": "b"}}
    whole = client.responses.create(**asked, **fields)
    text, last = "", None
    for event in client.responses.create(**asked, **fields, stream=True):
        if event.type == "response.output_text.delta":
            text += event.delta
        last = event
    counted = client.responses.input_tokens.count(**asked)
    assert counted.input_tokens == whole.usage.input_tokens
    assert whole.status == status
    assert text == whole.output_text and last is not None
    assert last.type == f"response.{whole.status}"
    assert last.response.output_text == text and last.response.metadata == {"a": "b"}
    assert last.response.usage.output_tokens == whole.usage.output_tokens
    # What came goes back as it is.
    history = [{"role": "user", "content": question}, *whole.output]
    again = client.responses.create(model="demo", input=[*history, *QUESTION], **fields)
    assert again.usage.input_tokens > whole.usage.input_tokens


def test_the_streaming_helper_gives_the_final_response(client: openai.OpenAI) -> None:
    with client.responses.stream(model="demo", input=QUESTION) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    assert final.output_text == "5" and final.status == "completed"
    assert {"response.created", "response.output_text.delta", "response.completed"} <= kinds
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="demo", input="hi", previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id" and "input" in caught.value.message


def test_errors_are_the_clients_own_kinds(client: openai.OpenAI, server: Served) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="demo", messages=QUESTION, temperature=3)
    assert caught.value.param == "temperature" and "between 0 and 2" in caught.value.message
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {}}}
    with pytest.raises(openai.BadRequestError, match="chat template does not write tools"):
        client.chat.completions.create(model="demo", messages=QUESTION, tools=[tool])
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4o", messages=QUESTION)
    wrong = openai.OpenAI(base_url=url(server), api_key="wrong", max_retries=0)
    with wrong, pytest.raises(openai.AuthenticationError):
        wrong.models.list()


ADD: list[Any] = [
    {
        "type": "function",
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "required": ["a"],
            "additionalProperties": False,
        },
        "strict": True,
    }
]


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """A client of a server whose model thinks and calls a tool."""
    with (
        serve_caller(tmp_path_factory.mktemp("tools")) as served,
        openai.OpenAI(base_url=url(served), api_key=KEY, max_retries=0) as client,
    ):
        yield client


@pytest.mark.feature("W16")
def test_a_function_is_called_and_its_output_taken(caller: openai.OpenAI) -> None:
    asked: Any = {"model": "demo", "tools": ADD, "reasoning": {"summary": "auto"}}
    first = caller.responses.create(input="2 + 3?", **asked)
    reasoning, message, call = first.output
    assert reasoning.content[0].text == "Hm." and message.content[0].text == "I add."
    assert (call.type, call.name, call.arguments) == ("function_call", "add", '{"a": 2}')
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "5"}
    history = [{"role": "user", "content": "2 + 3?"}, *first.output, output]
    with caller.responses.stream(input=history, **asked) as stream:
        arguments = [
            event.snapshot
            for event in stream
            if event.type == "response.function_call_arguments.delta"
        ]
        final = stream.get_final_response()
    assert arguments[-1] == '{"a": 2}'
    assert [each.type for each in final.output] == ["reasoning", "message", "function_call"]
    assert final.output[-1].parsed_arguments == {"a": 2}
    assert final.usage.output_tokens_details.reasoning_tokens > 0
    assert final.usage.input_tokens > first.usage.input_tokens


def test_many_clients_at_once_each_get_their_own_answer(server: Served) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=url(server), api_key=KEY) as client:

            async def add(a: int) -> str:
                answer = await client.completions.create(
                    model="demo", prompt=f"{a} + {a} =", max_tokens=4
                )
                return answer.choices[0].text

            return await asyncio.gather(*map(add, range(10, 42)))

    alone = [
        server.post("/v1/completions", {"prompt": f"{a} + {a} =", "max_tokens": 4}).json
        for a in range(10, 42)
    ]
    assert asyncio.run(ask()) == [each["choices"][0]["text"] for each in alone]


def test_a_stream_that_is_closed_frees_its_pages(client: openai.OpenAI, server: Served) -> None:
    stream = client.completions.create(
        model="demo",
        prompt=STORY,
        max_tokens=2000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    stream.close()
    server.wait_for("headstock_kv_pages_live", 0)


class Weather(pydantic.BaseModel):
    """Arguments of a tool."""

    town: Literal["Oslo", "Bergen"]


class Sum(pydantic.BaseModel):
    """The form of an answer."""

    sum: Literal[4, 5]


@pytest.mark.feature("W3", "W5")
def test_a_schema_and_tools_come_together() -> None:
    template = "{{ tools | tojson if tools else '' }}{{ messages[-1].content }}" + HERMES_CALLS
    tools: list[Any] = [openai.pydantic_function_tool(Weather)]
    functions: list[Any] = [{"type": "function", **tool["function"]} for tool in tools]
    with (
        serve("--chat-template", template, "--num-pages", "256", key=KEY) as served,
        openai.OpenAI(base_url=url(served), api_key=KEY, max_retries=0) as client,
    ):
        kinds = set()
        for seed in range(8):
            answer = client.chat.completions.parse(
                model="demo",
                messages=QUESTION,
                tools=tools,
                response_format=Sum,
                parallel_tool_calls=False,
                temperature=1.5,
                seed=seed,
                max_tokens=90,
            )
            message = answer.choices[0].message
            (call,) = message.tool_calls or [None]
            found = message.parsed if call is None else call.function.parsed_arguments
            kinds.add(type(found))
            response = client.responses.parse(
                model="demo",
                input="What is 2 + 3?",
                tools=functions,
                text_format=Sum,
                parallel_tool_calls=False,
                temperature=1.5,
                max_output_tokens=90,
                extra_body={"seed": seed},
            )
            (item,) = response.output
            assert item.type == "function_call" or isinstance(response.output_parsed, Sum)
    assert kinds == {Weather, Sum}
