"""Bodies of requests: what is wrong is refused by name, and nothing is ignored."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from headstock import RequestError, SamplingParams
from headstock_openai_server.api.errors import ApiError
from headstock_openai_server.api.responses_body import (
    FunctionCallInput,
    FunctionOutputInput,
    InputPart,
    ReasoningInput,
    ReasoningOptions,
    ResponsesBody,
    ResponsesStreamOptions,
    TextOptions,
)
from headstock_openai_server.api.schema import (
    CalledFunction,
    ChatBody,
    ChatMessage,
    CompletionBody,
    EmbeddingBody,
    MessageToolCall,
    StreamOptions,
)
from headstock_openai_server.api.unserved import SAME, UNSERVED
from headstock_openai_server.convert.conversations import make_conversation, make_messages
from headstock_openai_server.convert.limits import check_limits
from headstock_openai_server.convert.responses_input import make_chat_body
from headstock_openai_server.convert.sampling import make_chat_params, make_completion_params
from headstock_openai_server.http.decoding import check_values, decode_body
from headstock_openai_server.routes.completions import list_prompts
from headstock_openai_server.settings import ServerSettings

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def accept(data: bytes, kind: type) -> None:
    body = decode_body(data, kind)
    if isinstance(body, ResponsesBody):
        make_chat_body(body, 9)


def refusal(body: Any, kind: type = ChatBody) -> ApiError:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(ApiError) as caught:
        accept(data, kind)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.feature("W2")
@pytest.mark.parametrize(
    ("change", "param", "text"),
    [
        ({"temprature": 1}, "temprature", "did you mean temperature?"),
        ({"zork": {}}, "zork", "is not a known field; leave it out"),
        ({"n": "2"}, "n", "n is not valid: expected int | null, got str"),
        ({"n": True}, "n", "expected int | null, got bool"),
        ({"temperature": "warm"}, "temperature", "expected float | null, got str"),
        ({"stop": [1]}, "stop[0]", "expected str, got int"),
        ({"messages": "hi"}, "messages", "expected array, got str"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role", "is missing"),
        ({"messages": [{"role": "user", "colour": 1}]}, "messages[0].colour", "not a known field"),
        ({"stream_options": {"usage": True}}, "stream_options.usage", "is not a known field"),
        ({"structured_outputs": {"regx": ""}}, "structured_outputs.regx", "did you mean regex?"),
        (
            {"tools": [{"type": "function", "function": {"nme": "a"}}]},
            "tools[0].function.nme",
            "did you mean name?",
        ),
        ({"logit_bias": {"5": "x"}}, "logit_bias[...]", "expected float, got str"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], param: str, text: str) -> None:
    error = refusal(CHAT | change)
    assert error.param == param
    assert text in error.message


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"metadata": ' + b"[" * 200_000, "nested too deeply"),
        (b'{"messages": [], "temperature": NaN}', "not valid JSON"),
        (b'{"messages": [], "temperature": 1e999}', "temperature|JSON"),
        (b'{"messages": [], "n": 1' + b"0" * 5000 + b"}", "n is not valid|JSON"),
        (b'{"messages": [{"role": "\xff"}]}', "JSON|not valid"),
        (b"[]", "expected object, got array"),
        (b"{}", "messages is missing"),
    ],
)
def test_a_body_that_is_no_request_is_refused(data: bytes, text: str) -> None:
    error = refusal(data)
    assert any(each in error.message for each in text.split("|")), error.message


@pytest.mark.feature("W2")
@pytest.mark.parametrize("kind", UNSERVED, ids=lambda each: each.__name__)
def test_each_field_that_is_not_served_is_refused_unless_it_changes_nothing(
    kind: type[msgspec.Struct],
) -> None:
    required = {
        ChatBody: CHAT,
        CompletionBody: {"prompt": "hi"},
        EmbeddingBody: {"input": "hi"},
        ResponsesBody: {"input": "hi"},
    }
    options = {
        ResponsesStreamOptions: "stream_options",
        ReasoningOptions: "reasoning",
        TextOptions: "text",
    }
    items: dict[type, dict[str, Any]] = {
        FunctionCallInput: {"type": "function_call", "call_id": "a", "name": "f", "arguments": ""},
        FunctionOutputInput: {"type": "function_call_output", "call_id": "a", "output": "5"},
        ReasoningInput: {"type": "reasoning", "summary": []},
    }

    def body_with(name: str, value: object) -> tuple[dict[str, Any], type, str]:
        if kind is StreamOptions:
            return CHAT | {"stream_options": {name: value}}, ChatBody, f"stream_options.{name}"
        if kind is ChatMessage:
            message = {"role": "user", "content": "hi", name: value}
            return {"messages": [message]}, ChatBody, f"messages[0].{name}"
        if kind in options:
            options_body = {"input": "hi", options[kind]: {name: value}}
            return options_body, ResponsesBody, f"{options[kind]}.{name}"
        if kind in items:
            return {"input": [items[kind] | {name: value}]}, ResponsesBody, f"input[0].{name}"
        if kind is InputPart:
            part = {"type": "input_text", "text": "hi", name: value}
            body = {"input": [{"role": "user", "content": [part]}]}
            return body, ResponsesBody, f"input[0].content[0].{name}"
        return required[kind] | {name: value}, kind, name

    for name in UNSERVED[kind]:
        for same in (None, *SAME[name]):
            body, decoded, _ = body_with(name, same)
            accept(json.dumps(body).encode(), decoded)
        for other in ("else", 7, 1.0, [1], {"a": 1}):
            if other in SAME[name] and not isinstance(other, float):
                continue
            body, decoded, param = body_with(name, other)
            error = refusal(body, decoded)
            assert error.param == param and error.code == "unsupported"
            assert error.message.startswith(f"{param} is not supported; ")


def test_roles_and_parts_that_are_not_served_are_named() -> None:
    def refused(**message: Any) -> str:
        with pytest.raises(ApiError) as caught:
            make_messages([ChatMessage(**message)], 10)
        assert caught.value.status == 400
        return f"{caught.value.param}: {caught.value.message}"

    assert "messages[0].role: messages[0].role 'function' is" in refused(role="function")
    assert "messages[0].content: messages[0].content is missing; a tool's" in refused(role="tool")
    image = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "x"}}]
    assert "messages[0].content[1].type 'image_url'" in refused(role="user", content=image)
    cached = [{"type": "text", "text": "see", "cache_control": {}}]
    assert "content[0].cache_control is not" in refused(role="user", content=cached)
    assert make_messages([ChatMessage(role="developer", content="x", reasoning="r")], 1) == [
        {"role": "developer", "content": "x", "reasoning": "r"}
    ]
    function: Any = {"name": "f", "arguments": "{}"}
    call: Any = MessageToolCall(id="a", function=CalledFunction(**function), index=0)
    assert make_messages([ChatMessage(role="assistant", tool_calls=[call])], 1) == [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "a", "type": "function", "function": function}],
        }
    ]


@pytest.mark.feature("W10")
@pytest.mark.parametrize(
    ("name", "most", "params"),
    [
        ("max_stop_strings", 2, {"stop": ["a", "b"]}),
        ("max_stop_chars", 3, {"stop": ["a", "bcd"]}),
        ("max_logit_bias", 2, {"logit_bias": {5: 1, 6: 1}}),
        ("max_logprobs", 3, {"logprobs": 3}),
        ("max_logprobs", 1, {"prompt_logprobs": 1}),
        ("max_schema_bytes", 13, {"structured_outputs": {"json": {"enum": [1]}}}),
        ("max_schema_bytes", 10, {"structured_outputs": {"grammar": 'start: "x"'}}),
        ("max_schema_depth", 2, {"structured_outputs": {"json": {"enum": [1]}}}),
        ("max_regex_bytes", 4, {"structured_outputs": {"regex": "a\u00e9+"}}),
    ],
)
def test_each_limit_of_a_parameter_holds_at_its_edge(
    name: str, most: int, params: dict[str, Any]
) -> None:
    made = SamplingParams(**params)
    check_limits(made, ServerSettings(**{name: most}))  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=f"; at most {most - 1} are taken here$") as caught:
        check_limits(made, ServerSettings(**{name: most - 1}))  # type: ignore[arg-type]
    assert caught.value.parameter == next(iter(params))


@pytest.mark.feature("W10")
def test_the_number_of_tools_has_a_limit() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in "abc"]
    body = decode_body(json.dumps(CHAT | {"tools": tools}).encode(), ChatBody)
    make_conversation(body, body.messages, ServerSettings(max_tools=3))
    with pytest.raises(ApiError, match="tools has 3 entries; at most 2 are taken") as caught:
        make_conversation(body, body.messages, ServerSettings(max_tools=2))
    assert caught.value.param == "tools"


@pytest.mark.feature("W10")
@pytest.mark.parametrize(
    ("data", "count"),
    [
        (b'{"prompt": [%s]}' % b",".join([b"5"] * 31), 30),
        (b'{"prompt": [[5], [6]]}', 8 * 5),
        (b'{"prompt": "{[,:"}', 8 * 5),  # texts count too
    ],
)
def test_the_values_of_a_body_have_a_limit(data: bytes, count: int) -> None:
    check_values(data, count)
    with pytest.raises(ApiError, match=f"the body has more than {count - 1} values") as caught:
        check_values(data, count - 1)
    assert caught.value.status == 400


def test_every_form_of_a_prompt_is_told_from_the_others() -> None:
    assert list_prompts("a", 2) == ["a"]
    assert list_prompts([1, 2, 3], 2) == [[1, 2, 3]]
    assert list_prompts(["a", "b"], 2) == ["a", "b"]
    assert list_prompts([[1], [2, 3]], 2) == [[1], [2, 3]]
    for wrong, text in (([], "empty list"), (["a", [1]], "mixes forms"), ([1, "a"], "mixes forms")):
        with pytest.raises(ApiError, match=text):
            list_prompts(wrong, 2)  # type: ignore[arg-type]
    with pytest.raises(ApiError, match="prompt has 3 entries; at most 2"):
        list_prompts(["a", "b", "c"], 2)


def test_sampling_fields_mean_what_the_parameters_of_their_names_mean() -> None:
    values = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.2,
        "seed": 3,
        "stop": ["x"],
        "top_k": 4,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "min_tokens": 1,
        "stop_token_ids": [5],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "allowed_token_ids": [5, 6],
        "prompt_logprobs": 2,
        "user": "ada",
        "extra_args": {"a": [1, None]},
    }
    bias = {"logit_bias": {"7": 1.5}}
    body = decode_body(
        json.dumps(CHAT | values | bias | {"max_completion_tokens": 9}).encode(), ChatBody
    )
    wanted = SamplingParams(**values, logit_bias={7: 1.5}, max_tokens=9)
    assert make_chat_params(body, SamplingParams(), 2) == wanted
    for name, value in values.items():
        assert getattr(wanted, name) != getattr(SamplingParams(), name), f"{name}={value}"


def test_defaults_are_the_models_but_for_the_number_of_tokens() -> None:
    defaults = SamplingParams(temperature=0.3, max_tokens=256)
    chat = decode_body(json.dumps(CHAT).encode(), ChatBody)
    assert make_chat_params(chat, defaults, 1) == defaults.replace({"max_tokens": None})
    plain = decode_body(b'{"prompt": "hi"}', CompletionBody)
    assert make_completion_params(plain, defaults, 1) == defaults.replace({"max_tokens": 16})
    for params in (
        make_chat_params(chat, defaults, 1, max_tokens=7),
        make_completion_params(plain, defaults, 1, max_tokens=7),
    ):
        assert params == defaults.replace({"max_tokens": 7})


def test_fields_that_contradict_each_other_are_refused() -> None:
    def refused(**fields: Any) -> str:
        body = decode_body(json.dumps(CHAT | fields).encode(), ChatBody)
        with pytest.raises(ApiError) as caught:
            make_chat_params(body, SamplingParams(), 4)
        return caught.value.message

    assert refused(top_logprobs=2) == "top_logprobs needs logprobs: true"
    assert "differ" in refused(max_tokens=2, max_completion_tokens=3)
    assert refused(n=5) == "n is 5; at most 4 answers are given"


def test_fields_that_ask_for_nothing_change_nothing() -> None:
    body = CHAT | {"prompt_cache_key": "a", "safety_identifier": "b"}
    body |= {"logprobs": False, "top_logprobs": 0}
    plain, named = (
        make_chat_params(decode_body(json.dumps(each).encode(), ChatBody), SamplingParams(), 1)
        for each in (CHAT, body)
    )
    assert plain == named
