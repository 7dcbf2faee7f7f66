"""Calls of tools and reasoning through a server, whose engine writes what the test says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from served import Answer, Served, serve

CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }} {% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>"
    "{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)
"""It writes tools and calls as Hermes does, and closes reasoning that is not wanted."""
CALLED = r'headstock_requests_total{.*outcome="tool_calls"}'
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": [3]}}\n</tool_call>'
ADD = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}},
}
BODY = {"messages": [{"role": "user", "content": "2 + 3?"}], "tools": [ADD]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    template = tmp_path_factory.mktemp("tools") / "chat.jinja"
    template.write_text(TEMPLATE)
    text = f"<think>\nTwo.\n</think>\n\nI add.\n{CALL}\n{CALL}"
    script = {"text": text, "stops": True, "interval": 0.0005}
    with serve("--chat-template", str(template), script=script) as served:
        yield served


def fold(answer: Answer) -> dict[str, Any]:
    """The message that the chunks of a stream add up to, as clients merge them."""
    message: dict[str, Any] = {"calls": {}}
    for event in answer.events:
        for choice in event["choices"]:
            delta = choice["delta"]
            assert len(delta) <= 2
            for key in ("role", "content", "reasoning", "reasoning_content"):
                if key in delta:
                    message[key] = message.get(key, "") + delta[key]
            for call in delta.get("tool_calls", ()):
                index = call["index"]
                if index not in message["calls"]:
                    assert call.keys() == {"index", "id", "type", "function"}
                    assert call["function"] == {"name": "add", "arguments": ""}
                    message["calls"][index] = {"id": call["id"], "arguments": ""}
                else:
                    assert call.keys() == {"index", "function"}
                    assert call["function"].keys() == {"arguments"}
                message["calls"][index]["arguments"] += call["function"]["arguments"]
            message["finish_reason"] = choice["finish_reason"]
    return message


@pytest.mark.feature("W3", "W4")
def test_calls_and_reasoning_are_parts_of_their_own_whole_and_streamed(server: Served) -> None:
    before = server.metric(CALLED)
    answer = server.post(CHAT, BODY).json
    (choice,) = answer["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["content"] == "I add."
    assert message["reasoning"] == message["reasoning_content"] == "Two."
    assert [call["type"] for call in message["tool_calls"]] == ["function"] * 2
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "add", "arguments": '{"a": 2, "b": [3]}'}
    ] * 2
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == 2 and all(each.isalnum() and len(each) == 9 for each in ids)

    streamed = server.post(CHAT, BODY | {"stream": True, "stream_options": {"include_usage": True}})
    folded = fold(streamed)
    assert folded["role"] == "assistant" and folded["content"] == "I add."
    assert folded["reasoning"] == folded["reasoning_content"] == "Two."
    assert [each["arguments"] for each in folded["calls"].values()] == ['{"a": 2, "b": [3]}'] * 2
    assert folded["finish_reason"] == "tool_calls"
    assert streamed.events[-1]["usage"] == answer["usage"]
    assert server.metric(CALLED) == before + 2
    # A token of arguments is a chunk of its own.
    chunks = [
        each
        for each in streamed.events
        if each["choices"] and "tool_calls" in each["choices"][0]["delta"]
    ]
    assert len(chunks) > 10


def test_each_token_has_its_log_probability_whatever_part_it_is_of(server: Served) -> None:
    asked = BODY | {"logprobs": True, "top_logprobs": 2}
    whole = server.post(CHAT, asked)
    content = whole.json["choices"][0]["logprobs"]["content"]
    assert len(content) == whole.json["usage"]["completion_tokens"]
    assert [len(each["top_logprobs"]) for each in content] == [2] * len(content)
    events = server.post(CHAT, asked | {"stream": True}).events
    parts = [each["choices"][0]["logprobs"] for each in events]
    assert [token for part in parts if part for token in part["content"]] == content
    prompt = {"prompt": "Once upon", "echo": True, "logprobs": 1, "max_tokens": 1}
    scores = server.post("/v1/completions", prompt).json["choices"][0]["logprobs"]
    assert scores["token_logprobs"] == [None, -1.0, -1.0]


@pytest.mark.parametrize("logprobs", [False, True])
def test_each_token_has_its_id_whatever_part_it_is_of(server: Served, logprobs: bool) -> None:
    asked = BODY | {"return_token_ids": True, "include_reasoning": False, "logprobs": logprobs}
    whole = server.post(CHAT, asked).json
    (choice,) = whole["choices"]
    assert choice["message"]["content"] == "I add." and "reasoning" not in choice["message"]
    assert len(whole["prompt_token_ids"]) == whole["usage"]["prompt_tokens"]
    assert len(choice["token_ids"]) == whole["usage"]["completion_tokens"]
    text = server.post("/detokenize", {"tokens": choice["token_ids"]}).json["prompt"]
    assert text == f"<think>\nTwo.\n</think>\n\nI add.\n{CALL}\n{CALL}"
    streamed = server.post(CHAT, asked | {"stream": True})
    first, *rest = streamed.events
    assert first["prompt_token_ids"] == whole["prompt_token_ids"]
    assert not any("prompt_token_ids" in each for each in rest)
    chunks = [each["choices"][0] for each in rest]
    assert [id for each in chunks for id in each.get("token_ids", ())] == choice["token_ids"]
    folded = fold(streamed)
    assert folded["content"] == "I add." and "reasoning" not in folded
    assert len(folded["calls"]) == 2
    if logprobs:
        parts = [each["logprobs"]["content"] for each in chunks if each["logprobs"]]
        assert [each for part in parts for each in part] == choice["logprobs"]["content"]


@pytest.mark.feature("W4")
def test_reasoning_that_the_template_has_closed_is_not_looked_for(server: Served) -> None:
    variables = {"chat_template_kwargs": {"enable_thinking": False}}
    message = server.post(CHAT, BODY | variables).json["choices"][0]["message"]
    assert message["content"] == "<think>\nTwo.\n</think>\n\nI add."
    assert message.keys() == {"role", "content", "refusal", "tool_calls"}


def test_without_tools_a_call_is_text(server: Served) -> None:
    for body in (
        {"messages": BODY["messages"]},
        {"messages": BODY["messages"], "tools": []},
        BODY | {"tool_choice": "none"},
    ):
        (choice,) = server.post(CHAT, body).json["choices"]
        assert choice["finish_reason"] == "stop"
        assert choice["message"]["content"] == f"I add.\n{CALL}\n{CALL}"
        assert "tool_calls" not in choice["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_alone_ends_the_answer(server: Served, stream: bool) -> None:
    answer = server.post(CHAT, BODY | {"parallel_tool_calls": False, "stream": stream})
    if stream:
        folded = fold(answer)
        assert len(folded["calls"]) == 1 and folded["finish_reason"] == "tool_calls"
    else:
        (choice,) = answer.json["choices"]
        assert len(choice["message"]["tool_calls"]) == 1
        assert choice["finish_reason"] == "tool_calls"
    server.wait_for("headstock_requests_running", 0)


@pytest.mark.feature("W3")
def test_a_call_that_is_cut_off_has_no_brackets_and_the_true_reason(server: Served) -> None:
    tokens = server.post("/tokenize", {"prompt": f"<think>\nTwo.\n</think>\n\nI add.\n{CALL}"})
    count = tokens.json["count"]
    (choice,) = server.post(CHAT, BODY | {"max_tokens": count - 14}).json["choices"]
    assert choice["finish_reason"] == "length"
    (call,) = choice["message"]["tool_calls"]
    assert '{"a": 2, "b": [3]}'.startswith(call["function"]["arguments"])
    assert call["function"]["arguments"] != '{"a": 2, "b": [3]}'


def test_a_required_call_and_a_structure_that_is_no_json_are_refused(server: Served) -> None:
    structure = {"structured_outputs": {"regex": "a"}}
    error = server.post(CHAT, BODY | {"tool_choice": "required"} | structure).error
    assert error["message"].startswith("tool_choice requires a call")
    assert error["param"] == "tool_choice"
    error = server.post(CHAT, BODY | structure).error
    assert "only be combined with tools where" in error["message"]
    assert error["param"] == "structured_outputs"


@pytest.mark.parametrize("structure", [{}, {"response_format": {"type": "text"}}])
def test_a_tool_that_no_grammar_follows_is_the_choices_fault(
    server: Served, structure: dict[str, Any]
) -> None:
    deep: dict[str, Any] = {}
    for _ in range(70):
        deep = {"items": deep}
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    asked = {"messages": BODY["messages"], "tools": [tool], "tool_choice": "required"}
    error = server.post(CHAT, asked | structure).error
    assert error["param"] == "tool_choice" and error["message"].startswith("tool_choice: json is")


@pytest.mark.feature("W7")
def test_tools_and_calls_of_earlier_turns_reach_the_template(server: Served) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text",
                                                                            "text": "brief."}]},
        {"role": "user", "content": "2 + 3?"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "Hm."},
        {"role": "tool", "tool_call_id": "a", "content": "5"},
    ]  # fmt: skip
    tokens = server.post("/tokenize", {"messages": messages, "tools": [ADD]}).json["tokens"]
    text = server.post("/detokenize", {"tokens": tokens}).json["prompt"]
    shown, _, rest = text.partition(" system: ")
    assert json.loads(shown) == [ADD]
    called = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
    assert rest == f"Be brief.user: 2 + 3?assistant: {called}tool: 5"
    # What the model wrote itself may be no JSON, and goes back as it is.
    call["function"]["arguments"] = "{a: 2}"
    assert server.post("/tokenize", {"messages": messages}).status == 200


@pytest.mark.feature("W16")
def test_a_response_has_reasoning_message_and_calls_as_items(server: Served) -> None:
    function = {"type": "function", **ADD["function"], "strict": False}
    asked = {"input": "2 + 3?", "tools": [function], "tool_choice": "auto"}
    body = server.post("/v1/responses", asked).json
    reasoning, message, *calls = body["output"]
    assert body["status"] == "completed" and body["tools"] == [function]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Two."}]
    assert message["content"][0]["text"] == "I add."
    assert [(each["type"], each["name"], each["arguments"]) for each in calls] == [
        ("function_call", "add", '{"a": 2, "b": [3]}')
    ] * 2
    assert len({each["call_id"] for each in calls}) == len({each["id"] for each in calls}) == 2
    marked = server.post("/tokenize", {"prompt": "<think>\nTwo.\n</think>"}).json["count"]
    assert body["usage"]["output_tokens_details"] == {"reasoning_tokens": marked}

    events = server.post("/v1/responses", asked | {"stream": True}).named_events
    done = [each["item"] for each in events if each["type"] == "response.output_item.done"]
    last = events[-1]["response"]
    assert last["output"] == done and last["usage"] == body["usage"]
    for streamed, whole in zip(done, body["output"], strict=True):
        names = ("id", "call_id")
        assert {**streamed, **{name: whole[name] for name in names if name in whole}} == whole

    # The items go back as they are, and are one message of the assistant's again.
    results = [
        {"type": "function_call_output", "call_id": each["call_id"], "output": "5"}
        for each in calls
    ]
    history = [{"role": "user", "content": "2 + 3?"}, *body["output"], *results]
    again = server.post("/v1/responses", asked | {"input": history, "instructions": "Add."}).json
    called = [
        {"id": each["call_id"], "function": {"name": "add", "arguments": each["arguments"]}}
        for each in calls
    ]
    messages = [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "2 + 3?"},
        {"role": "assistant", "content": "I add.", "reasoning": "Two.", "tool_calls": called},
        *({"role": "tool", "tool_call_id": each["call_id"], "content": "5"} for each in calls),
    ]
    tools = [{"type": "function", "function": ADD["function"] | {"strict": False}}]
    chat = server.post(CHAT, {"messages": messages, "tools": tools}).json
    assert again["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]


@pytest.mark.feature("W3", "W16")
def test_a_choice_of_allowed_tools_hides_the_others(server: Served) -> None:
    other = {"type": "function", "function": {"name": "subtract"}}
    named = {"type": "function", "function": {"name": "add"}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named]}}
    chosen = server.post(CHAT, BODY | {"tools": [ADD, other], "tool_choice": choice}).json
    plain = server.post(CHAT, BODY).json
    assert chosen["usage"] == plain["usage"]
    (choice,) = chosen["choices"]
    assert choice["finish_reason"] == "tool_calls"
    error = server.post(CHAT, BODY | {"tool_choice": {"type": "custom"}}).error
    assert error["message"].endswith("got type custom") and error["param"] == "tool_choice"

    function, hidden = ({"type": "function", **each["function"]} for each in (ADD, other))
    named = {"type": "function", "name": "add"}
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [named]}
    asked = {"input": "2 + 3?", "tools": [function, hidden], "tool_choice": choice}
    body = server.post("/v1/responses", asked).json
    assert body["tool_choice"] == choice and len(body["tools"]) == 2
    assert body["usage"]["input_tokens"] == plain["usage"]["prompt_tokens"]


def test_a_response_that_is_cut_off_says_so_and_where(server: Served) -> None:
    asked = {"input": "2 + 3?", "tools": [{"type": "function", **ADD["function"]}]}
    whole = server.post("/v1/responses", asked).json["usage"]["output_tokens"]
    begun = server.post("/tokenize", {"prompt": "<think>\nTwo"}).json["count"]
    for most, kinds in (
        (begun, ["reasoning"]),
        (whole - 9, ["reasoning", "message", *2 * ["function_call"]]),
    ):
        cut = asked | {"max_output_tokens": most}
        body = server.post("/v1/responses", cut).json
        assert (body["status"], body["max_output_tokens"]) == ("incomplete", most)
        assert body["incomplete_details"] == {"reason": "max_output_tokens"}
        assert [each["type"] for each in body["output"]] == kinds
        *others, last = [each["status"] for each in body["output"]]
        assert last == "incomplete" and set(others) <= {"completed"}
        assert body["usage"]["output_tokens"] == most
        event = server.post("/v1/responses", cut | {"stream": True}).named_events[-1]
        assert event["type"] == "response.incomplete"
        assert event["response"]["usage"] == body["usage"]
