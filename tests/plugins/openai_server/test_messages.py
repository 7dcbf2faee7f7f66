"""`/v1/messages`: the same answers as chats, in the form of Anthropic's API."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from answer_pieces import TEXT, build_pieces
from served import Served

import headstock_demo
from headstock.outputs import CompletionOutput, ToolCall
from headstock.text import Tokenizer, join_pieces
from headstock_openai_server.api.errors import ApiError, unavailable
from headstock_openai_server.api.ignored import IgnoredFields
from headstock_openai_server.api.messages_body import MessagesBody
from headstock_openai_server.api.schema import ChatBody
from headstock_openai_server.convert.conversations import to_plain
from headstock_openai_server.convert.messages_input import make_chat_body
from headstock_openai_server.convert.messages_output import BlockWriter
from headstock_openai_server.http.decoding import decode_body
from headstock_openai_server.routes.answering import make_identity
from headstock_openai_server.routes.messages import MessageInProgress, MessageStream

MESSAGES = "/v1/messages"
QUESTION = {"role": "user", "content": "What is 2 + 3?"}
ASKED: dict[str, Any] = {"model": "demo", "max_tokens": 20, "messages": [QUESTION]}
BLOCKS = [
    {"type": "thinking", "thinking": "Two and three.", "signature": "unsigned"},
    {"type": "text", "text": "So:"},
    {"type": "tool_use", "name": "add", "input": {"a": 2}},
    {"type": "text", "text": "and"},
    {"type": "tool_use", "name": "add", "input": {"a": 2}},
    {"type": "tool_use", "name": "add", "input": {"a": 2}},
    {"type": "text", "text": "Wait."},
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(Path(headstock_demo.__file__).parent / "checkpoint")


def read(change: dict[str, Any], *, reads: tuple[str, ...] = ()) -> ChatBody:
    """The chat of a request, for a template that reads these variables."""
    body = decode_body(json.dumps(ASKED | change).encode(), MessagesBody, IgnoredFields())
    return make_chat_body(body, 9, reads, IgnoredFields())


@pytest.mark.feature("W18")
def test_a_message_has_anthropics_form_and_the_text_of_the_chat(server: Served) -> None:
    answer = server.post(MESSAGES, ASKED, headers={"x-request-id": "message-form"})
    body = answer.json
    assert answer.status == 200 and answer.headers["request-id"] == "message-form"
    assert body.pop("id").startswith("msg_")
    usage = body.pop("usage")
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": "demo",
        "content": [{"type": "text", "text": "5"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
    }
    chat = server.post("/v1/chat/completions", {"messages": [QUESTION]}).json["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat["prompt_tokens"]
    assert usage["output_tokens"] == chat["completion_tokens"]
    counted = server.post(f"{MESSAGES}/count_tokens", {"messages": [QUESTION]}).json
    assert counted == {"input_tokens": chat["prompt_tokens"]}
    line = server.wait_for_line(id="message-form", path=MESSAGES)
    assert (line["finish"], line["completion_tokens"]) == (["stop"], usage["output_tokens"])


@pytest.mark.feature("W18")
def test_a_stream_has_anthropics_events_in_order_and_adds_up_to_the_message(
    server: Served,
) -> None:
    start, ping, begin, *deltas, end, last, stop = server.post(
        MESSAGES, ASKED | {"stream": True}
    ).typed_events
    assert (start["type"], ping) == ("message_start", {"type": "ping"})
    assert (start["message"]["content"], start["message"]["stop_reason"]) == ([], None)
    assert start["message"]["usage"]["output_tokens"] == 0
    assert begin == {
        "type": "content_block_start",
        "index": 0,
        "content_block": {"type": "text", "text": ""},
    }
    assert {each["type"] for each in deltas} == {"content_block_delta"}
    assert "".join(each["delta"]["text"] for each in deltas) == "5"
    assert end == {"type": "content_block_stop", "index": 0}
    assert last["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert last["usage"]["output_tokens"] == 2
    assert stop == {"type": "message_stop"}


@pytest.mark.parametrize(
    ("change", "reason", "sequence"),
    [
        ({"stop_sequences": ["mill", "upon"]}, "stop_sequence", "upon"),
        ({"max_tokens": 3}, "max_tokens", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_the_reason_of_the_end_has_anthropics_name(
    server: Served, change: dict[str, Any], reason: str, sequence: str | None, stream: bool
) -> None:
    story = {"messages": [{"role": "user", "content": "Tell a story."}], "stream": stream}
    answer = server.post(MESSAGES, ASKED | story | change)
    end = answer.typed_events[-2]["delta"] if stream else answer.json
    assert (end["stop_reason"], end["stop_sequence"]) == (reason, sequence)


@pytest.mark.feature("W18")
@pytest.mark.parametrize(
    ("path", "change", "status", "kind", "text"),
    [
        (MESSAGES, {"model": "claude-x"}, 404, "not_found_error", "served: demo"),
        (MESSAGES, {"max_tokens": 0}, 400, "invalid_request_error", "max_tokens: expected"),
        (MESSAGES, {"stop_sequences": ["a"] * 17}, 400, "invalid_request_error", "stop_sequences:"),
        (MESSAGES, {"thread": {"type": "create"}}, 400, "invalid_request_error", "thread is"),
        (MESSAGES, {"system": "a" * 4000}, 413, "request_too_large", "4000 bytes"),
        (f"{MESSAGES}/count_tokens", {"messages": []}, 400, "invalid_request_error", "messages:"),
        (f"{MESSAGES}/batches", {}, 404, "not_found_error", "there is nothing"),
    ],
)
def test_errors_have_anthropics_body(
    server: Served, path: str, change: dict[str, Any], status: int, kind: str, text: str
) -> None:
    answer = server.post(path, (ASKED if path == MESSAGES else {}) | change)
    assert answer.status == status
    body = answer.json
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert text in body["error"]["message"]
    # The tool runner of Anthropic's library goes on without threads.
    if "thread" in change:
        assert body["error"]["details"] == {"error_code": "thread_unsupported_request"}


@pytest.mark.feature("W10")
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": "secret"}, 200),
        ({"x-api-key": "wrong"}, 401),
        ({"x-api-key": "wrong", "authorization": "Bearer secret"}, 200),
        ({"x-api-key": "secret", "authorization": "Bearer wrong"}, 200),
        ({"authorization": "Basic secret"}, 401),
        ({}, 401),
    ],
)
def test_a_key_may_come_in_the_header_of_anthropics_clients(
    server: Served, headers: dict[str, str], status: int
) -> None:
    keyless = Served(server.process, server.port, None)
    headers = headers | {"anthropic-version": "2023-06-01", "anthropic-beta": "a,b"}
    answer = keyless.post(f"{MESSAGES}/count_tokens", {"messages": [QUESTION]}, headers=headers)
    assert answer.status == status
    if status == 401:
        assert answer.json["error"]["type"] == "authentication_error"
        assert keyless.get("/v1/models", headers=headers).error["type"] == "invalid_request_error"


def test_turns_and_their_blocks_become_the_messages_of_a_chat() -> None:
    use = {"type": "tool_use", "id": "a", "name": "add", "input": {"a": 2}}
    cached = {"cache_control": {"type": "ephemeral"}}
    chat = read(
        {
            "system": [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."} | cached],
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "user", "content": [{"type": "text", "text": "there"} | cached]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Hm.", "signature": "a"},
                        {"type": "redacted_thinking", "data": "a"},
                        {"type": "text", "text": "I add."},
                        use | cached,
                        use | {"id": "b", "caller": {"type": "direct"}},
                        {"type": "text", "text": "Wait."},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "a", "content": "5"} | cached,
                        {"type": "tool_result", "tool_use_id": "b", "is_error": True},
                        {"type": "text", "text": "So?"},
                    ],
                },
            ],
        }
    )
    assert [
        (each.role, each.content, each.reasoning, len(each.tool_calls or ()), each.tool_call_id)
        for each in chat.messages
    ] == [
        ("system", "Be kind.", None, 0, None),
        ("user", "hi\n\nthere", None, 0, None),
        ("assistant", "I add.", "Hm.", 2, None),
        ("assistant", "Wait.", None, 0, None),
        ("tool", "5", None, 0, "a"),
        ("tool", "", None, 0, "b"),
        ("user", "So?", None, 0, None),
    ]
    calls = chat.messages[2].tool_calls or []
    assert [(each.id, each.function.arguments) for each in calls] == [
        ("a", '{"a": 2}'),
        ("b", '{"a": 2}'),
    ]
    assert chat.continue_final_message is False


def test_an_answer_goes_on_with_a_last_turn_of_the_assistant(server: Served) -> None:
    begun = [QUESTION, {"role": "assistant", "content": [{"type": "text", "text": "Once upon"}]}]
    answer = server.post(MESSAGES, ASKED | {"messages": begun}).json
    chat = {"messages": [QUESTION, {"role": "assistant", "content": "Once upon"}]}
    chat |= {"add_generation_prompt": False, "continue_final_message": True, "max_tokens": 20}
    whole = server.post("/v1/chat/completions", chat).json
    assert answer["content"] == [
        {"type": "text", "text": whole["choices"][0]["message"]["content"]}
    ]


def test_tools_thinking_and_the_rest_become_the_chats() -> None:
    closed = {"type": "object", "additionalProperties": False}
    tool = {"name": "add", "input_schema": closed, "strict": True}
    form = {"type": "json_schema", "schema": {"type": "object"}}
    change = {
        "tools": [tool | {"type": "custom", "cache_control": {"type": "ephemeral"}}],
        "tool_choice": {"type": "tool", "name": "add", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "low", "format": form},
        "stop_sequences": ["a"],
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "context_management": {"edits": []},
        "top_k": 5,
    }
    chat = read(change, reads=("enable_thinking", "reasoning_effort"))
    function = {"name": "add", "parameters": closed, "strict": True}
    assert to_plain(chat.tools) == [{"type": "function", "function": function}]
    assert msgspec.to_builtins(chat.tool_choice)["function"] == {"name": "add"}
    assert chat.parallel_tool_calls is False and chat.response_format is not None
    assert (chat.stop, chat.user, chat.top_k, chat.reasoning_effort) == (["a"], "u", 5, "low")
    for kind, choice in (("auto", "auto"), ("any", "required"), ("none", "none")):
        assert read({"tool_choice": {"type": kind}}).tool_choice == choice


@pytest.mark.parametrize(
    ("thinking", "reads", "variables"),
    [
        ({"type": "enabled", "budget_tokens": 9}, "enable_thinking", {"enable_thinking": True}),
        ({"type": "adaptive"}, "thinking messages", {"thinking": True}),
        ({"type": "disabled"}, "enable_thinking thinking", {"enable_thinking": 0, "thinking": 0}),
        ({"type": "enabled", "budget_tokens": 9}, "thinking_budget", {"thinking_budget": 9}),
        ({"type": "disabled"}, "messages", {}),
        (None, "enable_thinking", {}),
    ],
    ids=str,
)
def test_thinking_is_switched_by_the_variables_that_the_template_reads(
    thinking: dict[str, Any] | None, reads: str, variables: dict[str, Any]
) -> None:
    chat = read({"thinking": thinking}, reads=tuple(reads.split()))
    assert chat.chat_template_kwargs == variables


def test_a_switch_that_the_template_lacks_is_named_or_refused() -> None:
    body = msgspec.convert(
        ASKED | {"thinking": {"type": "enabled", "budget_tokens": 9}}, MessagesBody
    )
    ignored = IgnoredFields()
    make_chat_body(body, 9, ("enable_thinking",), ignored)
    assert ignored.paths == {"thinking.budget_tokens"}
    with pytest.raises(ApiError, match="thinking is not supported: the chat template does not"):
        make_chat_body(body, 9, (), IgnoredFields(refuses=True))


@pytest.mark.parametrize(
    ("change", "param", "text"),
    [
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0].type",
            "image is not supported here; served: text, tool_result",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_result"}]}]},
            "messages[0].content[0].type",
            "served: text, thinking",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
            "is missing",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "tool_use_id": "a",
                                "content": [{"type": "image"}],
                            }
                        ],
                    }
                ]
            },
            "messages[0].content[0].content[0].type",
            "image is not supported",
        ),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].role", "invalid enum value"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}],
                    }
                ]
            },
            "messages",
            "send its tool_result",
        ),
        ({"messages": [QUESTION] * 10}, "messages", "at most 9 are taken"),
        ({"system": [{"type": "image"}]}, "system[0].type", "served: text"),
        ({"tools": [{"type": "bash_20250124", "name": "a"}]}, "tools[0].type", "turn the others"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema", "is missing"),
        (
            {"tools": [{"name": "a", "input_schema": {}, "defer_loading": True}]},
            "tools[0].defer_loading",
            "leave it out",
        ),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name", "is missing"),
        ({"container": "a"}, "container", "is not supported"),
        ({"max_tokns": 5}, "max_tokns", "did you mean max_tokens?"),
        ({"max_tokens": None}, "max_tokens", "expected int"),
    ],
    ids=str,
)
@pytest.mark.feature("W2")
def test_what_is_not_served_is_refused_by_name(
    change: dict[str, Any], param: str, text: str
) -> None:
    with pytest.raises(ApiError) as caught:
        read(change)
    assert caught.value.param == param and text in caught.value.message
    assert caught.value.message.startswith(param)


def list_blocks(pieces: list[CompletionOutput]) -> list[dict[str, Any]]:
    """The blocks that the pieces make; checked against the events of a stream."""
    writer = BlockWriter()
    events = [event for piece in pieces for event in writer.add_piece(piece)]
    blocks: list[dict[str, Any]] = msgspec.to_builtins(writer.blocks)
    made: list[dict[str, Any]] = []
    inputs = [""] * len(blocks)
    is_open = False
    for event in map(msgspec.to_builtins, events):
        kind, index = event["type"], event["index"]
        if kind == "content_block_start":
            assert not is_open and index == len(made)
            made.append(event["content_block"])
            is_open = True
            continue
        assert is_open and index == len(made) - 1, "only the last block grows"
        if kind == "content_block_stop":
            is_open = False
            continue
        delta = event["delta"]
        if delta.pop("type") == "input_json_delta":
            inputs[index] += delta["partial_json"]
            continue
        for name, text in delta.items():
            made[index][name] += text
    assert not is_open
    for block, text in zip(made, inputs, strict=True):
        if block["type"] == "tool_use":
            block["input"] = json.loads(text)
    assert made == blocks
    for block in blocks:
        assert block.pop("id", "a")
    return blocks


@pytest.mark.feature("W18")
def test_an_answer_has_the_same_blocks_wherever_it_is_split(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    singles = build_pieces(tokenizer, *([token] for token in ids), end="stop")
    assert list_blocks(singles) == list_blocks([join_pieces(singles)]) == BLOCKS
    for cut in range(1, len(singles)):
        # A client that is behind gets several pieces as one.
        assert list_blocks([join_pieces(singles[:cut]), join_pieces(singles[cut:])]) == BLOCKS
        assert list_blocks(build_pieces(tokenizer, ids[:cut], ids[cut:], end="stop")) == BLOCKS


@pytest.mark.parametrize(
    ("arguments", "reason", "block"),
    [
        ('{"a": 2', "length", {"type": "tool_use", "name": "add", "input": {}, "id": "c"}),
        ('{"a": 2', "stop", {"type": "text", "text": 'add({"a": 2)'}),
        ('{"a": ' + "[" * 3000, "stop", {"type": "text", "text": 'add({"a": ' + "[" * 3000 + ")"}),
        ("[2]", "stop", {"type": "text", "text": "add([2])"}),
    ],
)
def test_a_call_that_no_client_could_run_is_none(
    arguments: str, reason: str, block: dict[str, Any]
) -> None:
    writer = BlockWriter()
    call = ToolCall(index=0, id="c", name="add", arguments=arguments)
    piece = CompletionOutput(
        index=0, text="", token_ids=[], tool_calls=(call,), finish_reason=reason
    )
    list(writer.add_piece(piece))
    assert msgspec.to_builtins(writer.blocks) == [block]


def begin_message(*, room: int = 20) -> MessageInProgress:
    request: Any = SimpleNamespace(max_tokens=room)
    return MessageInProgress(make_identity("msg_", "m"), request, 20)


@pytest.mark.parametrize(
    ("finish", "room", "reason"),
    [
        ("length", 20, "max_tokens"),
        ("length", 19, "model_context_window_exceeded"),
        ("tool_calls", 20, "tool_use"),
    ],
)
def test_a_full_context_and_a_call_have_reasons_of_their_own(
    finish: str, room: int, reason: str
) -> None:
    message = begin_message(room=room)
    message.add_piece(CompletionOutput(index=0, text="a", token_ids=[5], finish_reason=finish))
    assert message.end().stop_reason == reason


def test_a_stream_that_breaks_off_ends_with_anthropics_error() -> None:
    generation: Any = SimpleNamespace()
    events = MessageStream(begin_message(), generation).write_error(unavailable("it ends", "a"))
    name, data = events.decode().strip().split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: ")) == {
        "type": "error",
        "error": {"type": "api_error", "message": "it ends", "details": {"error_code": "a"}},
    }


def test_what_claude_code_sends_is_taken() -> None:
    sent = {
        "model": "demo",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "system": [{"type": "text", "text": "You are.", "cache_control": {"type": "ephemeral"}}],
        "tools": [
            {"name": "Bash", "description": "Run.", "input_schema": {"type": "object"}},
        ],
        "metadata": {"user_id": "user_" + "a" * 300},
        "max_tokens": 32000,
        "temperature": 1,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "stream": True,
    }
    ignored = IgnoredFields()
    body = decode_body(json.dumps(sent).encode(), MessagesBody, ignored)
    chat = make_chat_body(body, 9, (), ignored)
    assert chat.stream and [each.role for each in chat.messages] == ["system", "user"]
    assert ignored.paths == {"system[].cache_control", "context_management", "thinking"}
