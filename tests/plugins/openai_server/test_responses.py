"""`/v1/responses`: the same answers as chats, as items and named events."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from answer_pieces import TEXT, build_pieces
from attrs import evolve
from served import Served

import headstock_demo
from headstock import SamplingParams
from headstock.outputs import CompletionOutput, ToolCall
from headstock.text import Tokenizer, join_pieces
from headstock.text.answer import AnswerFormat
from headstock.text.reasoning import MARKS
from headstock_openai_server.api.errors import ApiError, unavailable
from headstock_openai_server.api.ignored import IgnoredFields
from headstock_openai_server.api.responses_body import ResponsesBody
from headstock_openai_server.convert.conversations import make_conversation
from headstock_openai_server.convert.responses_input import make_chat_body
from headstock_openai_server.convert.responses_output import ItemWriter
from headstock_openai_server.http.decoding import decode_body
from headstock_openai_server.routes.answering import make_identity
from headstock_openai_server.routes.responses import (
    ResponseAnswer,
    ResponseStream,
    begin_response,
    count_reasoning_tokens,
)
from headstock_openai_server.settings import ServerSettings

RESPONSES = "/v1/responses"
QUESTION = "What is 2 + 3?"
ITEMS = [
    ("reasoning", "Two and three."),
    ("message", "So:"),
    ("function_call", '{"a": 2}'),
    ("message", "and"),
    ("function_call", '{"a": 2}'),
    ("function_call", '{"a": 2}'),
    ("message", "Wait."),
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(Path(headstock_demo.__file__).parent / "checkpoint")


@pytest.mark.feature("W16")
def test_a_response_has_openais_form(server: Served) -> None:
    asked: dict[str, Any] = {
        "model": "demo",
        "input": QUESTION,
        "metadata": {"a": "b"},
        "store": True,
    }
    asked |= {"include": ["reasoning.encrypted_content"]}
    answer = server.post(RESPONSES, asked, headers={"x-request-id": "response-form"})
    body = answer.json
    assert (answer.status, body["object"], body["status"]) == (200, "response", "completed")
    assert body["id"].startswith("resp_") and isinstance(body["created_at"], int)
    assert (body["store"], body["metadata"], body["error"]) == (False, {"a": "b"}, None)
    assert (body["tool_choice"], body["tools"], body["parallel_tool_calls"]) == ("auto", [], True)
    (message,) = body["output"]
    assert message.pop("id").startswith("msg_")
    assert message == {
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "5", "annotations": [], "logprobs": []}],
    }
    usage = body["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}
    line = server.wait_for_line(id="response-form", path=RESPONSES)
    assert (line["finish"], line["completion_tokens"]) == (["stop"], 2)


@pytest.mark.feature("W16")
def test_a_stream_has_openais_events_and_ends_with_the_whole_response(server: Served) -> None:
    answer = server.post(RESPONSES, {"input": QUESTION, "stream": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = answer.named_events
    created, in_progress, added, part, *deltas, done, part_done, item_done, completed = events
    assert [each["type"].removeprefix("response.") for each in events] == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.delta" for _ in deltas),
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert created["response"] == in_progress["response"] and created["response"]["output"] == []
    assert created["response"]["usage"] is None
    assert (added["item"]["status"], added["item"]["content"]) == ("in_progress", [])
    assert part["part"]["text"] == ""
    assert "".join(each["delta"] for each in deltas) == done["text"] == "5"
    assert item_done["item"]["content"] == [part_done["part"]]
    assert completed["response"]["output"] == [item_done["item"]]
    whole = server.post(RESPONSES, {"input": QUESTION}).json
    assert completed["response"]["usage"] | {"input_tokens_details": None} == whole["usage"] | {
        "input_tokens_details": None
    }


def test_the_tokens_of_a_prompt_are_counted_before_it_runs(server: Served) -> None:
    asked = {"model": "demo", "input": QUESTION, "instructions": "Be brief."}
    used = server.post(RESPONSES, asked).json["usage"]["input_tokens"]
    counted = server.post(f"{RESPONSES}/input_tokens", asked).json
    assert counted == {"object": "response.input_tokens", "input_tokens": used}
    error = server.post(f"{RESPONSES}/input_tokens", {"input": []}).error
    assert error["param"] == "input"


def test_a_response_is_the_chat_of_the_same_messages(server: Served) -> None:
    sampling = {"temperature": 1.0, "seed": 3, "top_p": 0.9, "top_k": 20}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Tell a story."}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Once", "annotations": []}],
        },
    ]
    asked = {"input": items, "instructions": "Be brief.", "max_output_tokens": 20}
    response = server.post(RESPONSES, asked | sampling).json
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Tell a story."},
        {"role": "assistant", "content": "Once"},
    ]
    chat = server.post(
        "/v1/chat/completions", {"messages": messages, "max_tokens": 20, **sampling}
    ).json
    (message,) = response["output"]
    assert message["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert response["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert (response["temperature"], response["top_p"]) == (1.0, 0.9)


@pytest.mark.parametrize(
    ("change", "param", "text"),
    [
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens: expected"),
        ({"temperature": 3}, "temperature", "between 0 and 2"),
        ({"input": []}, "input", "input: expected a list of one or more"),
        ({"input": [{"role": "user", "content": "a"}] * 4}, "input", "input has 4 items"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"model": "gpt-5"}, "model", "does not exist"),
    ],
)
def test_errors_name_fields_as_the_client_did(
    server: Served, change: dict[str, Any], param: str, text: str
) -> None:
    error = server.post(RESPONSES, {"input": "hi"} | change).error
    assert error["param"] == param and text in error["message"]


@pytest.mark.parametrize(
    ("change", "param", "text"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "turn the others off"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "is missing"),
        ({"tools": [{"type": "namespace", "name": "a"}]}, "tools[0].tools", "is missing"),
        (
            {"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "custom"}]}]},
            "tools[0].tools[0].type",
            "turn the others off",
        ),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type", "function, allowed_tools"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name", "is missing"),
        ({"tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice.mode", "is missing"),
        ({"include": ["file_search_call.results"]}, "include[0]", "leave it out"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type", "the item itself"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type", "served: message, function_call"),
        ({"input": [{"type": ["message"]}]}, "input[0].type", "is not supported"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role", "invalid enum value"),
        ({"input": [{"role": "user", "content": "a", "colour": 1}]}, "input[0].colour", "known"),
        (
            {"text": {"format": {"type": "json_schema", "name": "a"}}},
            "text.format.schema",
            "missing",
        ),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing is stored"),
        ({"background": True}, "background", "stream the answer"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]},
            "input[0].content[0].type",
            "only text is",
        ),
    ],
    ids=str,
)
@pytest.mark.feature("W2")
def test_what_is_not_served_is_refused_by_name_with_a_way_out(
    change: dict[str, Any], param: str, text: str
) -> None:
    with pytest.raises(ApiError) as caught:
        make_chat_body(
            decode_body(
                json.dumps({"input": "hi"} | change).encode(), ResponsesBody, IgnoredFields()
            ),
            9,
            IgnoredFields(),
        )
    assert caught.value.param == param and text in caught.value.message
    assert caught.value.message.startswith(param)


def test_what_codex_sends_is_taken() -> None:
    function = {"type": "function", "name": "exec_command", "strict": False, "parameters": {}}
    text = [{"type": "input_text", "text": "hi"}]
    sent = {
        "model": "demo",
        "input": [{"type": "message", "id": "msg_1", "role": "developer", "content": text}],
        "instructions": "Be brief.",
        "tools": [function],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "a",
        "client_metadata": {"turn_id": "b"},
    }
    chat, _ = make_chat_body(
        decode_body(json.dumps(sent).encode(), ResponsesBody, IgnoredFields()), 9, IgnoredFields()
    )
    assert [each.role for each in chat.messages] == ["system", "developer"]


def test_functions_of_namespaces_have_their_names_before_their_own() -> None:
    def group(name: str, *functions: str) -> dict[str, Any]:
        tools = [{"type": "function", "name": each, "description": "Do."} for each in functions]
        return {"type": "namespace", "name": name, "description": "A server.", "tools": tools}

    function = {"type": "function", "name": "run"}
    call = {"type": "function_call", "call_id": "a", "name": "run", "arguments": "{}"}
    sent = {
        "input": [call | {"namespace": "mcp__docs__"}],
        "tools": [function, group("mcp__docs__", "run", "read"), group("agents", "run")],
        "tool_choice": {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [function, function | {"namespace": "agents"}],
        },
    }
    chat, names = make_chat_body(
        decode_body(json.dumps(sent).encode(), ResponsesBody, IgnoredFields()), 9, IgnoredFields()
    )
    flat = ["run", "mcp__docs__run", "mcp__docs__read", "agents__run"]
    assert [each.function.name for each in chat.tools or ()] == flat == list(names)
    about = [None, "A server.\n\nDo.", "Do.", "A server.\n\nDo."]
    assert [each.function.description for each in chat.tools or ()] == about
    assert chat.messages[0].tool_calls is not None
    assert chat.messages[0].tool_calls[0].function.name == "mcp__docs__run"
    conversation = make_conversation(chat, chat.messages, ServerSettings(), IgnoredFields())
    assert [tool.name for tool in conversation.forced_tools] == ["run", "agents__run"]

    writer = ItemWriter(names)
    calls = tuple(
        ToolCall(index=i, id=f"c{i}", name=name, arguments="{}")
        for i, name in enumerate((*flat, "other"))
    )
    empty = CompletionOutput(index=0, text="", token_ids=[])
    list(writer.add_piece(evolve(empty, tool_calls=calls, finish_reason="tool_calls")))
    assert [
        (each["name"], each.get("namespace")) for each in msgspec.to_builtins(writer.items)
    ] == [
        *(("run", None), ("run", "mcp__docs__"), ("read", "mcp__docs__"), ("run", "agents")),
        ("other", None),
    ]
    twice = sent | {"tools": [group("a", "run"), {"type": "function", "name": "a__run"}]}
    with pytest.raises(ApiError, match="two tools are called a__run"):
        make_chat_body(msgspec.convert(twice, ResponsesBody), 9, IgnoredFields())


def test_reasoning_text_and_calls_in_a_row_are_one_message() -> None:
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    thought = {"type": "reasoning", "summary": [], "content": None}
    parts = [{"type": "reasoning_text", "text": "Hm."}]
    summary = [{"type": "summary_text", "text": "Short."}]
    output = [{"type": "input_text", "text": "5"}]
    items = [
        {"role": "developer", "content": "x"},
        thought | {"content": parts, "summary": summary},
        call,
        {"role": "assistant", "content": "I call."},
        {"type": "function_call_output", "call_id": "a", "output": output},
        thought | {"summary": summary},
        {"role": "assistant", "content": "5"},
        {"role": "assistant", "content": "6"},
        thought,
    ]  # fmt: skip
    chat, _ = make_chat_body(msgspec.convert({"input": items}, ResponsesBody), 9, IgnoredFields())
    assert [
        (each.role, each.content, each.reasoning, len(each.tool_calls or ()))
        for each in chat.messages
    ] == [
        ("developer", "x", None, 0),
        ("assistant", "I call.", "Hm.", 1),
        ("tool", "5", None, 0),
        ("assistant", "5", "Short.", 0),
        ("assistant", "6", None, 0),
        ("assistant", "", None, 0),
    ]


def test_tools_and_the_form_of_the_answer_become_the_chats() -> None:
    parameters = {"type": "object", "additionalProperties": False}
    function = {"type": "function", "name": "f", "parameters": parameters, "strict": True}
    form = {"type": "json_schema", "name": "a", "schema": {"type": "object"}}
    fields: dict[str, Any] = {
        "input": "hi",
        "tools": [function],
        "tool_choice": {"type": "function", "name": "f"},
        "parallel_tool_calls": False,
        "text": {"format": form, "verbosity": "medium"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "chat_template_kwargs": {"enable_thinking": False},
        "priority": 3,
    }
    chat, _ = make_chat_body(msgspec.convert(fields, ResponsesBody), 9, IgnoredFields())
    assert chat.tools is not None and chat.tools[0].function.name == "f"
    assert msgspec.to_builtins(chat.tool_choice)["function"] == {"name": "f"}
    assert chat.response_format is not None and chat.response_format.json_schema is not None
    assert chat.response_format.json_schema.schema == {"type": "object"}
    assert (chat.reasoning_effort, chat.priority, chat.n) == ("low", 3, 1)
    assert chat.parallel_tool_calls is False


THINK = MARKS["think"]


def list_items(pieces: list[CompletionOutput]) -> list[tuple[str, str]]:
    """The items that the pieces make; checked against the events of a stream."""
    writer = ItemWriter({})
    events = [event for piece in pieces for event in writer.add_piece(piece)]
    made: list[tuple[str, str]] = []
    for item in msgspec.to_builtins(writer.items):
        text = item["arguments"] if "arguments" in item else item["content"][0]["text"]
        made.append((item["type"], text))
    texts = [""] * len(made)
    begun = []
    for number, event in enumerate(map(msgspec.to_builtins, events)):
        assert event["sequence_number"] == number
        index = event["output_index"]
        match event["type"].split(".")[1:]:
            case ["output_item", "added"]:
                begun.append(event["item"]["type"])
            case [_, "delta"]:
                assert index == len(begun) - 1, "only the last item grows"
                texts[index] += event["delta"]
            case ["output_item", "done"]:
                assert event["item"] == msgspec.to_builtins(writer.items[index])
    assert list(zip(begun, texts, strict=True)) == made
    return made


@pytest.mark.feature("W16")
def test_an_answer_has_the_same_items_wherever_it_is_split(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    singles = build_pieces(tokenizer, *([token] for token in ids), end="stop")
    assert list_items(singles) == list_items([join_pieces(singles)]) == ITEMS
    for cut in range(1, len(singles)):
        # A client that is behind gets several pieces as one.
        assert list_items([join_pieces(singles[:cut]), join_pieces(singles[cut:])]) == ITEMS
        halves = build_pieces(tokenizer, ids[:cut], ids[cut:], end="stop")
        assert list_items(halves) == ITEMS


def test_an_answer_without_any_text_has_an_empty_message(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<think>\nHm.\n</think>")
    assert list_items(build_pieces(tokenizer, ids, end="stop")) == [
        ("reasoning", "Hm."),
        ("message", ""),
    ]
    assert list_items(build_pieces(tokenizer, ids, end="length")) == [("reasoning", "Hm.")]


def test_reasoning_tokens_are_those_up_to_the_closing_mark(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<think>\nHm.\n</think>")
    for after in ("", " So", "\n\nSo</think>"):
        found = count_reasoning_tokens([*ids, *tokenizer.encode(after)], tokenizer, THINK, "Hm.")
        assert found == len(ids)
    assert count_reasoning_tokens(ids[:-1], tokenizer, THINK, "Hm.\n</think") == len(ids) - 1
    # A text of the marks, and none of them
    ids = tokenizer.encode("<think>hi</think>")
    assert count_reasoning_tokens([*ids, *ids], tokenizer, THINK, "hi") == len(ids)
    ids = tokenizer.encode("hi\n</think>")
    assert count_reasoning_tokens([*ids, *ids], tokenizer, THINK, "hi") == len(ids)
    special: Any = SimpleNamespace(
        find_ids=lambda texts: frozenset({7}),
        decode=lambda ids, skip_special_tokens: "h" * len(ids),
    )
    assert count_reasoning_tokens([5, 6, 7, 8], special, THINK, "hh") == 3


@pytest.mark.parametrize("after", ["", "\n</think>So"])
def test_reasoning_tokens_are_those_up_to_the_call_that_ends_it(
    tokenizer: Tokenizer, after: str
) -> None:
    ids = tokenizer.encode("<think>\nHm.")
    call = '\n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    tokens = [*ids, *tokenizer.encode(call + after)]
    for cut in range(len(ids), len(tokens) + 1):
        pieces = build_pieces(tokenizer, tokens[:cut], tokens[cut:], end="stop")
        answer = begin_answer(tokenizer)
        for piece in pieces:
            answer.add_piece(piece)
        assert answer.num_reasoning_tokens == len(ids)
        expected = [("reasoning", "Hm."), ("function_call", "{}"), ("message", "So")]
        assert list_items(pieces) == expected[: 2 + bool(after)]


def begin_answer(tokenizer: Tokenizer) -> ResponseAnswer:
    """A response whose answer has reasoning between marks."""
    body = ResponsesBody(input="hi")
    response = begin_response(make_identity("resp_", "m"), body, SamplingParams())
    request: Any = SimpleNamespace(answer_format=AnswerFormat(reasoning=THINK), tokenizer=tokenizer)
    return ResponseAnswer(response, request, {})


def test_a_response_that_breaks_off_has_what_was_whole_and_the_reason(tokenizer: Tokenizer) -> None:
    body = ResponsesBody(input="hi")
    response = begin_response(make_identity("resp_", "m"), body, SamplingParams())
    request: Any = SimpleNamespace(answer_format=None, tokenizer=tokenizer)
    generation: Any = SimpleNamespace(num_prompt_tokens=3, num_output_tokens=4, num_cached_tokens=0)
    answer = ResponseAnswer(response, request, {})
    for piece in build_pieces(tokenizer, tokenizer.encode("<think>Hm.</think>So"), end="stop")[:-1]:
        answer.add_piece(piece)
    events = ResponseStream(answer, generation).write_error(unavailable("it ends", "shutting_down"))
    name, data = events.decode().strip().split("\n")
    failed = msgspec.json.decode(data.removeprefix("data: "))
    assert name == "event: response.failed"
    assert failed["response"]["error"] == {"code": "shutting_down", "message": "it ends"}
    assert [each["type"] for each in failed["response"]["output"]] == ["reasoning"]
