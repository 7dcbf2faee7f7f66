"""Bodies of requests: what is wrong is refused by name, and nothing is ignored in silence."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from often import count_examples
from starlette.requests import Request

from headstock import RequestError, SamplingParams
from headstock_openai_server.api.errors import ApiError
from headstock_openai_server.api.ignored import IgnoredFields
from headstock_openai_server.api.messages_body import (
    ClientTool,
    MessagesBody,
    PromptBody,
    TextBlockBody,
    ThinkingOptions,
    ToolResultBody,
    ToolUseBody,
)
from headstock_openai_server.api.ollama_body import (
    EmbedBody,
    GenerateBody,
    OllamaChatBody,
    OllamaMessage,
    OllamaOptions,
    ShowBody,
)
from headstock_openai_server.api.responses_body import (
    FunctionCallInput,
    FunctionOutputInput,
    FunctionTool,
    InputMessage,
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
    FunctionBody,
    MessageToolCall,
    RerankBody,
    ScoreBody,
    StreamOptions,
    TextPart,
    ToolBody,
)
from headstock_openai_server.api.unserved import IGNORED, SAME, UNSERVED
from headstock_openai_server.convert.conversations import make_conversation, make_messages
from headstock_openai_server.convert.limits import check_limits, find_num_kept
from headstock_openai_server.convert.messages_input import make_chat_body as make_messages_chat
from headstock_openai_server.convert.ollama_input import make_chat_body as make_ollama_chat
from headstock_openai_server.convert.responses_input import make_chat_body
from headstock_openai_server.convert.sampling import make_chat_params, make_completion_params
from headstock_openai_server.http.decoding import IGNORED as SCOPE_KEY
from headstock_openai_server.http.decoding import check_values, decode_body, read_body
from headstock_openai_server.routes.completions import list_prompts
from headstock_openai_server.settings import ServerSettings

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def accept(data: bytes, kind: type, *, refuses: bool = False) -> set[str]:
    """The fields without effect."""
    ignored = IgnoredFields(refuses=refuses)
    body = decode_body(data, kind, ignored)
    if isinstance(body, ResponsesBody):
        make_chat_body(body, 9, ignored)
    if isinstance(body, OllamaChatBody | GenerateBody):
        make_ollama_chat(body, (), ignored)
    if isinstance(body, PromptBody):
        make_messages_chat(body, 9, ("enable_thinking",), ignored)
    if isinstance(body, ChatBody):
        make_conversation(body, body.messages, ServerSettings(), ignored)
    return ignored.paths


def refusal(body: Any, kind: type = ChatBody, *, refuses: bool = False) -> ApiError:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(ApiError) as caught:
        accept(data, kind, refuses=refuses)
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


REQUIRED: dict[type, dict[str, Any]] = {
    ChatBody: CHAT,
    CompletionBody: {"prompt": "hi"},
    EmbeddingBody: {"input": "hi"},
    RerankBody: {"query": "hi", "documents": ["you"]},
    ScoreBody: {"text_1": "hi", "text_2": "you"},
    ResponsesBody: {"input": "hi"},
    PromptBody: CHAT,
    OllamaChatBody: {"model": "m"},
    GenerateBody: {"model": "m"},
    EmbedBody: {"model": "m", "input": "hi"},
    ShowBody: {},
    MessagesBody: CHAT | {"max_tokens": 5},
}
OPTIONS = {ResponsesStreamOptions: "stream_options", ReasoningOptions: "reasoning"}
OPTIONS |= {TextOptions: "text"}
FUNCTION = {"name": "f", "parameters": {}}
CALL = {"id": "a", "function": {"name": "f", "arguments": "{}"}}
ITEMS: dict[type, dict[str, Any]] = {
    InputMessage: {"role": "user", "content": "hi"},
    FunctionCallInput: {"type": "function_call", "call_id": "a", "name": "f", "arguments": ""},
    FunctionOutputInput: {"type": "function_call_output", "call_id": "a", "output": "5"},
    ReasoningInput: {"type": "reasoning", "summary": []},
}


BLOCKS: dict[type, dict[str, Any]] = {
    ClientTool: {"name": "f", "input_schema": {}},
    ThinkingOptions: {"type": "enabled"},
    TextBlockBody: {"type": "text", "text": "hi"},
    ToolUseBody: {"type": "tool_use", "id": "a", "name": "f", "input": {}},
    ToolResultBody: {"type": "tool_result", "tool_use_id": "a", "content": ""},
}


def read_block(block: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The field of Anthropic's API that holds this, and its place."""
    if "input_schema" in block:
        return {"tools": [block]}, "tools[0]"
    if block["type"] == "enabled":
        return {"thinking": block}, "thinking"
    role = "assistant" if block["type"] == "tool_use" else "user"
    turns = [{"role": role, "content": [block]}, {"role": "user", "content": "hi"}]
    return {"messages": turns}, "messages[0].content[0]"


def body_with(kind: type, name: str, value: object) -> tuple[dict[str, Any], type, str]:
    """A body in which the part of this kind has the field, the body's kind, the field's path."""
    field = {name: value}
    chat: dict[type, tuple[dict[str, Any], str]] = {
        StreamOptions: ({"stream_options": field}, "stream_options"),
        ChatMessage: ({"messages": [CHAT["messages"][0] | field]}, "messages[0]"),
        TextPart: (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"} | field]}]},
            "messages[0].content[0]",
        ),
        MessageToolCall: (
            {"messages": [{"role": "assistant", "tool_calls": [CALL | field]}]},
            "messages[0].tool_calls[0]",
        ),
        CalledFunction: (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [CALL | {"function": CALL["function"] | field}],  # type: ignore[operator]
                    }
                ]
            },
            "messages[0].tool_calls[0].function",
        ),
        ToolBody: (
            {"tools": [{"type": "function", "function": FUNCTION} | field]},
            "tools[0]",
        ),
        FunctionBody: (
            {"tools": [{"type": "function", "function": FUNCTION | field}]},
            "tools[0].function",
        ),
    }
    if kind in chat:
        change, where = chat[kind]
        return CHAT | change, ChatBody, f"{where}.{name}"
    if kind in OPTIONS:
        return {"input": "hi", OPTIONS[kind]: field}, ResponsesBody, f"{OPTIONS[kind]}.{name}"
    if kind in ITEMS:
        return {"input": [ITEMS[kind] | field]}, ResponsesBody, f"input[0].{name}"
    if kind is OllamaOptions:
        return {"model": "m", "options": field}, GenerateBody, f"options.{name}"
    if kind is OllamaMessage:
        message = {"role": "user", "content": "hi"} | field
        return {"model": "m", "messages": [message]}, OllamaChatBody, f"messages[0].{name}"
    if kind in BLOCKS:
        change, where = read_block(BLOCKS[kind] | field)
        return REQUIRED[PromptBody] | change, PromptBody, f"{where}.{name}"
    if kind is InputPart:
        part = {"type": "input_text", "text": "hi"} | field
        body = {"input": [{"role": "user", "content": [part]}]}
        return body, ResponsesBody, f"input[0].content[0].{name}"
    if kind is FunctionTool:
        tool = {"type": "function"} | FUNCTION | field
        return {"input": "hi", "tools": [tool]}, ResponsesBody, f"tools[0].{name}"
    return REQUIRED[kind] | field, kind, name


def accept_defaults(kind: type, name: str) -> None:
    """Assert that the default values of a field are not worth a word."""
    for same in (None, *SAME.get(name, ())):
        body, decoded, _ = body_with(kind, name, same)
        assert accept(json.dumps(body).encode(), decoded, refuses=True) == set()


def list_others(name: str) -> list[Any]:
    """Values that are not the default of a field."""
    values = ("else", 7, 1.0, [1], {"a": 1})
    defaults = [(type(same), same) for same in SAME.get(name, ())]
    return [each for each in values if (type(each), each) not in defaults]


@pytest.mark.feature("W2")
@pytest.mark.parametrize("kind", UNSERVED, ids=lambda each: each.__name__)
def test_each_field_that_is_not_served_is_refused_unless_it_changes_nothing(
    kind: type[msgspec.Struct],
) -> None:
    for name in UNSERVED[kind]:
        accept_defaults(kind, name)
        for other in list_others(name):
            body, decoded, param = body_with(kind, name, other)
            error = refusal(body, decoded)
            assert error.param == param and error.code == "unsupported"
            assert error.message.startswith(f"{param} is not supported; ")


@pytest.mark.feature("W2")
@pytest.mark.parametrize("kind", IGNORED, ids=lambda each: each.__name__)
def test_each_field_that_changes_no_token_is_named_or_refused(kind: type[msgspec.Struct]) -> None:
    for name in IGNORED[kind]:
        accept_defaults(kind, name)
        for other in list_others(name):
            body, decoded, param = body_with(kind, name, other)
            path = param.replace("[0]", "[]")
            assert accept(json.dumps(body).encode(), decoded) == {path}
            error = refusal(body, decoded, refuses=True)
            assert error.param == param and error.code == "unsupported"


def test_what_changes_no_token_never_reaches_the_template() -> None:
    plain: dict[str, Any] = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
    }
    noisy = json.loads(json.dumps(plain))
    first, second = noisy["messages"]
    first["id"] = first["content"][0]["cache_control"] = {"type": "ephemeral"}
    second["reasoning_details"] = second["tool_calls"][0]["provider_specific_fields"] = [1]
    noisy["tools"][0]["cache_control"] = noisy["tools"][0]["function"]["cache_control"] = {}

    def rendered(body: dict[str, Any]) -> tuple[Any, ...]:
        decoded = decode_body(json.dumps(body).encode(), ChatBody, IgnoredFields())
        made = make_conversation(decoded, decoded.messages, ServerSettings(), IgnoredFields())
        return made.messages, made.tools

    assert rendered(noisy) == rendered(plain)


def test_the_setting_says_whether_such_fields_are_refused() -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps(CHAT | {"store": True}).encode()}

    def read(policy: str) -> set[str]:
        headers = [(b"content-type", b"application/json")]
        request = Request({"type": "http", "headers": headers}, receive)
        asyncio.run(read_body(request, ChatBody, ServerSettings(unknown_fields=policy)))
        ignored: IgnoredFields = request.scope[SCOPE_KEY]
        return ignored.paths

    assert read("warn") == {"store"}
    with pytest.raises(ApiError, match="store is not supported; leave it out"):
        read("refuse")


@pytest.mark.parametrize(
    ("given", "max_tokens", "kept"),
    [(None, 5, None), (7, 5, 7), (-1, 5, 95), (-1, None, 99), (-1, 100, 99)],
)
def test_a_prompt_may_be_cut_to_a_number_of_tokens_or_to_leave_room(
    given: int | None, max_tokens: int | None, kept: int | None
) -> None:
    assert find_num_kept(given, SamplingParams(max_tokens=max_tokens), 100) == kept


@pytest.mark.parametrize("name", ["max_token", "metdata", "stores", "service-tier", "zork"])
@pytest.mark.parametrize("kind", [ChatBody, CompletionBody, ResponsesBody])
def test_a_slip_is_refused_however_harmless(kind: type, name: str) -> None:
    assert refusal(REQUIRED[kind] | {name: 1}, kind).param == name


INTEGERS = {
    ChatBody: ("max_tokens", "n", "top_k", "seed", "top_logprobs", "max_completion_tokens"),
    CompletionBody: ("max_tokens", "n", "logprobs", "min_tokens", "priority", "prompt_logprobs"),
    ResponsesBody: ("max_output_tokens", "max_tool_calls", "top_k"),
    EmbeddingBody: ("priority",),
    RerankBody: ("top_n", "max_tokens_per_doc"),
}


@given(st.sampled_from(sorted(INTEGERS, key=str)), st.integers(1, 2**31 - 1), st.data())
@settings(max_examples=count_examples(40))
def test_a_whole_float_is_an_integer_wherever_one_is_expected(
    kind: type, number: int, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(INTEGERS[kind]))
    whole, plain = (
        decode_body(json.dumps(REQUIRED[kind] | {name: each}).encode(), kind, IgnoredFields())
        for each in (float(number), number)
    )
    assert whole == plain and type(getattr(whole, name)) is int
    error = refusal(REQUIRED[kind] | {name: number + 0.5}, kind)
    assert error.param == name and "expected int" in error.message


def test_whole_floats_in_lists_and_parts_are_integers_too() -> None:
    body = {"prompt": [[1.0, 2], [3.0]], "stop_token_ids": [5.0], "temperature": 1, "top_k": 4.0}
    body |= {"logit_bias": {"7": 1.0}, "extra_args": {"a": 1.0}}
    decoded = decode_body(json.dumps(body).encode(), CompletionBody, IgnoredFields())
    assert repr(decoded.prompt) == "[[1, 2], [3]]" and repr(decoded.stop_token_ids) == "[5]"
    assert decoded.temperature == 1 and decoded.logit_bias == {"7": 1.0}
    assert repr(decoded.extra_args) == "{'a': 1.0}"  # the plugin's own affair
    calls = [{"role": "assistant", "tool_calls": [CALL | {"index": 0.0}]}]
    accept(json.dumps({"messages": calls}).encode(), ChatBody)
    for wrong in ("16.5", "1e300", "-1e17", '"16"', "true"):
        assert refusal(b'{"messages": [], "n": %s}' % wrong.encode()).param == "n"


def test_roles_and_parts_that_are_not_served_are_named() -> None:
    def refused(**message: Any) -> str:
        with pytest.raises(ApiError) as caught:
            make_messages([ChatMessage(**message)], 10, IgnoredFields())
        assert caught.value.status == 400
        return f"{caught.value.param}: {caught.value.message}"

    assert "messages[0].role: messages[0].role 'function' is" in refused(role="function")
    assert "messages[0].content: messages[0].content is missing; a tool's" in refused(role="tool")
    image = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "x"}}]
    assert "messages[0].content[1].type 'image_url'" in refused(role="user", content=image)
    slip = [{"type": "text", "text": "see", "cache_controll": {}}]
    assert "did you mean cache_control?" in refused(role="user", content=slip)
    empty = [{"type": "text"}]
    assert "messages[0].content[0].text is missing" in refused(role="user", content=empty)
    assert make_messages(
        [ChatMessage(role="developer", content="x", reasoning="r")], 1, IgnoredFields()
    ) == [{"role": "developer", "content": "x", "reasoning": "r"}]
    function: Any = {"name": "f", "arguments": "{}"}
    call: Any = MessageToolCall(id="a", function=CalledFunction(**function), index=0)
    assert make_messages(
        [ChatMessage(role="assistant", tool_calls=[call])], 1, IgnoredFields()
    ) == [
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
    body = decode_body(json.dumps(CHAT | {"tools": tools}).encode(), ChatBody, IgnoredFields())
    make_conversation(body, body.messages, ServerSettings(max_tools=3), IgnoredFields())
    with pytest.raises(ApiError, match="tools has 3 entries; at most 2 are taken") as caught:
        make_conversation(body, body.messages, ServerSettings(max_tools=2), IgnoredFields())
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
        json.dumps(CHAT | values | bias | {"max_completion_tokens": 9}).encode(),
        ChatBody,
        IgnoredFields(),
    )
    wanted = SamplingParams(**values, logit_bias={7: 1.5}, max_tokens=9)
    assert make_chat_params(body, SamplingParams(), 2) == wanted
    for name, value in values.items():
        assert getattr(wanted, name) != getattr(SamplingParams(), name), f"{name}={value}"


def test_defaults_are_the_models_but_for_the_number_of_tokens() -> None:
    defaults = SamplingParams(temperature=0.3, max_tokens=256)
    chat = decode_body(json.dumps(CHAT).encode(), ChatBody, IgnoredFields())
    assert make_chat_params(chat, defaults, 1) == defaults.replace({"max_tokens": None})
    plain = decode_body(b'{"prompt": "hi"}', CompletionBody, IgnoredFields())
    assert make_completion_params(plain, defaults, 1) == defaults.replace({"max_tokens": 16})
    for params in (
        make_chat_params(chat, defaults, 1, max_tokens=7),
        make_completion_params(plain, defaults, 1, max_tokens=7),
    ):
        assert params == defaults.replace({"max_tokens": 7})


def test_fields_that_contradict_each_other_are_refused() -> None:
    def refused(**fields: Any) -> str:
        body = decode_body(json.dumps(CHAT | fields).encode(), ChatBody, IgnoredFields())
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
        make_chat_params(
            decode_body(json.dumps(each).encode(), ChatBody, IgnoredFields()), SamplingParams(), 1
        )
        for each in (CHAT, body)
    )
    assert plain == named
