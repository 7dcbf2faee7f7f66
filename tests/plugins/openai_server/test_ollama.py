"""Ollama's API: the same answers as chats, a line each."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from answer_pieces import TEXT, build_pieces
from served import CHECKPOINT, Answer, Served

import headstock_demo
from headstock.outputs import CompletionOutput, ToolCall
from headstock.text import Tokenizer, join_pieces
from headstock_openai_server.api.errors import ApiError
from headstock_openai_server.api.ignored import IgnoredFields
from headstock_openai_server.api.ollama_body import GenerateBody, OllamaChatBody
from headstock_openai_server.api.schema import ChatBody
from headstock_openai_server.convert.ollama_input import make_chat_body
from headstock_openai_server.convert.ollama_output import MessageWriter
from headstock_openai_server.http.decoding import decode_body

QUESTION = {"role": "user", "content": "What is 2 + 3?"}
CHAT: dict[str, Any] = {"model": "demo", "messages": [QUESTION]}
COUNTS = {
    *("total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration"),
    *("eval_count", "eval_duration"),
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(Path(headstock_demo.__file__).parent / "checkpoint")


def read_lines(answer: Answer) -> list[dict[str, Any]]:
    assert (answer.status, answer.headers["content-type"]) == (200, "application/x-ndjson")
    return [json.loads(line) for line in answer.body.decode().splitlines()]


def read(change: dict[str, Any], *, reads: tuple[str, ...] = ()) -> ChatBody:
    """The chat of a request, for a template that reads these variables."""
    body = decode_body(json.dumps(CHAT | change).encode(), OllamaChatBody, IgnoredFields())
    return make_chat_body(body, reads, IgnoredFields())


@pytest.mark.feature("W20")
def test_a_chat_streams_lines_that_add_up_to_the_whole_and_end_with_counts(
    server: Served,
) -> None:
    *lines, last = read_lines(server.post("/api/chat", CHAT))
    whole = server.post("/api/chat", CHAT | {"stream": False}).json
    assert "".join(each["message"]["content"] for each in lines) == "5"
    assert whole["message"] == {"role": "assistant", "content": "5"}
    assert all(each["done"] is False and "eval_count" not in each for each in lines)
    assert last["message"] == {"role": "assistant", "content": ""}
    chat = server.post("/v1/chat/completions", {"messages": [QUESTION]}).json["usage"]
    for end in (last, whole):
        assert (end["done"], end["done_reason"], end["model"]) == (True, "stop", "demo")
        assert end.keys() >= COUNTS and all(isinstance(end[name], int) for name in COUNTS)
        assert end["prompt_eval_count"] == chat["prompt_tokens"]
        assert end["eval_count"] == chat["completion_tokens"]
        parts = end["prompt_eval_duration"] + end["eval_duration"]
        assert 0 < parts <= end["total_duration"]
        assert datetime.fromisoformat(end["created_at"]).tzinfo is not None


UNNAMED_TYPES = ("", "application/x-www-form-urlencoded")
"""What clients send that say nothing of a body: litellm and curl."""


@pytest.mark.feature("W20")
@pytest.mark.parametrize("kind", UNNAMED_TYPES)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/chat", CHAT | {"stream": False}),
        ("/api/generate", {"model": "demo", "prompt": "What is 2 + 3?", "stream": False}),
        ("/api/show", {"model": "demo"}),
        ("/api/embed", {"model": "demo", "input": "a"}),
    ],
    ids=str,
)
def test_a_body_needs_no_content_type(
    server: Served, path: str, body: dict[str, Any], kind: str
) -> None:
    assert server.post(path, body, headers={"content-type": kind}).status == 200


@pytest.mark.parametrize("kind", UNNAMED_TYPES)
@pytest.mark.parametrize(
    "header",
    [
        {"origin": "https://page.example"},
        {"origin": "null"},
        {"referer": "https://page.example/"},
        {"sec-fetch-site": "cross-site"},
        {"Sec-Fetch-Mode": "no-cors"},
    ],
    ids=str,
)
def test_a_form_of_a_page_is_refused(server: Served, header: dict[str, str], kind: str) -> None:
    answer = server.post("/api/chat", CHAT, headers={"content-type": kind} | header)
    assert answer.status == 415 and "application/json" in answer.json["error"]
    assert server.post("/api/chat", CHAT, headers=header).status == 200


def test_other_types_and_other_routes_are_not_taken_for_json(server: Served) -> None:
    kinds = [("/api/chat", each) for each in ("text/plain", "multipart/form-data; boundary=a")]
    for path, kind in [*kinds, *(("/v1/chat/completions", each) for each in UNNAMED_TYPES)]:
        assert server.post(path, CHAT, headers={"content-type": kind}).status == 415


@pytest.mark.feature("W20")
def test_a_prompt_is_a_message_or_with_raw_a_text(server: Served) -> None:
    asked = {"model": "demo:latest", "stream": False, "options": {"num_predict": 3}}
    message = server.post("/api/generate", asked | {"prompt": "What is 2 + 3?"}).json
    assert (message["response"], message["done_reason"]) == ("5", "stop")
    assert message["model"] == "demo:latest"
    raw = server.post(
        "/api/generate",
        asked | {"prompt": "23 + 48 =", "raw": True, "logprobs": True, "top_logprobs": 2},
    ).json
    completion = server.post("/v1/completions", {"prompt": "23 + 48 =", "max_tokens": 3}).json
    assert (raw["response"], raw["done_reason"]) == (completion["choices"][0]["text"], "length")
    assert raw["prompt_eval_count"] == completion["usage"]["prompt_tokens"]
    assert "".join(each["token"] for each in raw["logprobs"]) == raw["response"]
    assert [len(each["top_logprobs"]) for each in raw["logprobs"]] == [2, 2, 2]


@pytest.mark.parametrize(
    ("path", "change"), [("/api/chat", {"messages": []}), ("/api/generate", {"prompt": ""})]
)
def test_without_a_prompt_the_answer_says_that_the_model_is_loaded(
    server: Served, path: str, change: dict[str, Any]
) -> None:
    answer = server.post(path, {"model": "demo", "keep_alive": -1} | change)
    assert (answer.json["done"], answer.json["done_reason"]) == (True, "load")
    assert answer.headers["x-ignored-fields"] == "keep_alive"


@pytest.mark.feature("W20")
def test_the_models_are_listed_and_described(server: Served) -> None:
    models = server.get("/api/tags").json["models"]
    assert [each["name"] for each in models] == ["demo", "org/demo"]
    size = sum(path.stat().st_size for path in CHECKPOINT.glob("*.safetensors"))
    assert models[0]["size"] == size > 0 and len(models[0]["digest"]) == 64
    datetime.fromisoformat(models[0]["modified_at"])
    (running, _) = server.get("/api/ps").json["models"]
    length = server.get("/v1/models").json["data"][0]["max_model_len"]
    assert running["context_length"] == length
    assert {name: running[name] for name in models[0]} == models[0]
    shown = server.post("/api/show", {"name": "demo"}).json
    assert shown["capabilities"] == ["completion"]
    assert "<|im_start|>" in shown["template"] and "temperature" in shown["parameters"]
    family = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{family}.context_length"] == length
    assert server.get("/api/version").json.keys() == {"version"}


@pytest.mark.feature("W6")
def test_vectors_are_those_of_embeddings(server: Served) -> None:
    asked = {"model": "demo", "input": ["a text", "another"]}
    answer = server.post("/api/embed", asked | {"truncate": True}).json
    embeddings = server.post("/v1/embeddings", asked).json
    assert answer["embeddings"] == [each["embedding"] for each in embeddings["data"]]
    assert answer["prompt_eval_count"] == embeddings["usage"]["prompt_tokens"]
    error = server.post("/api/embed", {"model": "demo", "input": []})
    assert (error.status, error.json) == (
        400,
        {"error": "input is an empty list; give at least one"},
    )


@pytest.mark.feature("W20")
@pytest.mark.parametrize(
    ("path", "change", "status", "text"),
    [
        ("/api/chat", {"model": "llama3"}, 404, "served: demo"),
        ("/api/show", {"model": None}, 400, "model is missing"),
        ("/api/chat", {"options": {"num_predict": 0}}, 400, "options.num_predict: expected"),
        ("/api/chat", {"options": {"repeat_penalty": -1}}, 400, "options.repeat_penalty: "),
        ("/api/chat", {"options": {"temprature": 1}}, 400, "did you mean temperature?"),
        ("/api/generate", {"prompt": "a" * 3000}, 400, "prompt"),
        ("/api/pull", {}, 404, "there is nothing at /api/pull"),
    ],
)
def test_errors_have_ollamas_body_and_its_names(
    server: Served, path: str, change: dict[str, Any], status: int, text: str
) -> None:
    base = CHAT if path == "/api/chat" else {"model": "demo"}
    answer = server.post(path, base | change)
    assert answer.status == status and answer.json.keys() == {"error"}
    assert text in answer.json["error"]


def test_options_and_the_rest_become_the_chats() -> None:
    options = {"num_predict": 5, "repeat_penalty": 1.1, "seed": 7, "stop": "a", "min_p": 0.1}
    chat = read({"options": options | {"num_ctx": 8}, "stream": False, "format": "json"})
    assert (chat.max_completion_tokens, chat.repetition_penalty, chat.seed) == (5, 1.1, 7)
    assert (chat.stop, chat.min_p, chat.stream) == ("a", 0.1, False)
    assert chat.response_format is not None and chat.response_format.type == "json_object"
    for endless in (-1, -2):
        chat = read({"options": {"num_predict": endless, "seed": -1}, "format": ""})
        assert (chat.max_completion_tokens, chat.seed, chat.response_format) == (None, None, None)
    schema = {"type": "object"}
    form = read({"format": schema}).response_format
    assert form is not None and form.json_schema is not None and form.json_schema.schema == schema
    with pytest.raises(ApiError, match="format: expected json or a JSON schema, got xml"):
        read({"format": "xml"})
    generate = GenerateBody(model="demo", prompt="hi", system="Be kind.")
    messages = make_chat_body(generate, (), IgnoredFields()).messages
    assert [(each.role, each.content) for each in messages] == [
        ("system", "Be kind."),
        ("user", "hi"),
    ]


def test_what_a_template_would_write_has_no_place_in_a_raw_prompt() -> None:
    body = GenerateBody(model="demo", prompt="hi", raw=True, think=True)
    ignored = IgnoredFields()
    make_chat_body(body, ("enable_thinking",), ignored)
    assert ignored.paths == {"think"}
    body.system = "Be kind."
    with pytest.raises(ApiError, match="system is not supported with raw"):
        make_chat_body(body, (), IgnoredFields())


@pytest.mark.parametrize(
    ("think", "reads", "variables", "effort"),
    [
        (True, "enable_thinking", {"enable_thinking": True}, None),
        (False, "thinking", {"thinking": False}, None),
        ("high", "reasoning_effort", {}, "high"),
        ("low", "enable_thinking reasoning_effort", {"enable_thinking": True}, "low"),
        (None, "enable_thinking", {}, None),
    ],
)
def test_thinking_is_what_the_template_makes_of_it(
    think: bool | str | None, reads: str, variables: dict[str, Any], effort: str | None
) -> None:
    chat = read({"think": think}, reads=tuple(reads.split()))
    assert (chat.chat_template_kwargs, chat.reasoning_effort) == (variables, effort)


def test_calls_without_ids_and_their_results_find_each_other() -> None:
    def call(name: str, **rest: Any) -> dict[str, Any]:
        return {"function": {"name": name, "arguments": {"a": "ä"}}, **rest}

    chat = read(
        {
            "messages": [
                QUESTION,
                {"role": "assistant", "content": "", "tool_calls": [call("f"), call("g")]},
                {"role": "tool", "content": "1", "tool_name": "g"},
                {"role": "tool", "content": "2"},
                {"role": "assistant", "thinking": "Hm.", "tool_calls": [call("f", id="x")]},
                {"role": "tool", "content": "3", "tool_call_id": "x"},
                {"role": "tool", "content": "4"},
            ]
        }
    )
    _, first, *results, second, third, fourth = chat.messages
    assert [each.id for each in first.tool_calls or ()] == ["000000001", "000000002"]
    assert (first.tool_calls or [])[0].function.arguments == '{"a": "ä"}'
    assert [each.tool_call_id for each in results] == ["000000002", "000000001"]
    assert (second.reasoning, third.tool_call_id, fourth.tool_call_id) == ("Hm.", "x", None)


def add_up(pieces: list[CompletionOutput]) -> tuple[str, str, list[dict[str, Any]]]:
    """The text, the thinking and the calls of all messages that the pieces make."""
    writer = MessageWriter()
    made = [each for each in map(writer.add_piece, pieces) if each is not None]
    messages = [msgspec.to_builtins(each) for each in made]
    calls = [call["function"] for each in messages for call in each.get("tool_calls", ())]
    texts = ("".join(each.get(name, "") for each in messages) for name in ("content", "thinking"))
    return (*texts, calls)  # type: ignore[return-value]


@pytest.mark.feature("W20")
def test_an_answer_adds_up_to_the_same_message_wherever_it_is_split(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    singles = build_pieces(tokenizer, *([token] for token in ids), end="stop")
    calls = [{"index": index, "name": "add", "arguments": {"a": 2}} for index in range(3)]
    expected = ("So:andWait.", "Two and three.", calls)
    assert add_up(singles) == add_up([join_pieces(singles)]) == expected
    for cut in range(1, len(singles), 3):
        assert add_up([join_pieces(singles[:cut]), join_pieces(singles[cut:])]) == expected


@pytest.mark.parametrize(
    ("reason", "text"), [("length", ""), ("stop", 'add({"a": 2)'), ("tool_calls", 'add({"a": 2)')]
)
def test_a_call_that_no_client_could_run_is_none(reason: str, text: str) -> None:
    call = ToolCall(index=0, id="c", name="add", arguments='{"a": 2')
    piece = CompletionOutput(
        index=0, text="", token_ids=[], tool_calls=(call,), finish_reason=reason
    )
    assert add_up([piece]) == (text, "", [])
