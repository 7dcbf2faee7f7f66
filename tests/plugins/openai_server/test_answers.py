"""Chats and completions over a real socket, from the demo model in a process of its own."""

from __future__ import annotations

import contextlib
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
from served import Served

import headstock_demo

CHECKPOINT = Path(headstock_demo.__file__).parent / "checkpoint"
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
OTHER = {"type": "function", "function": {"name": "g"}}
QUESTION = {"messages": [{"role": "user", "content": "What is 2 + 3?"}]}
SCHEMA_ALONE: dict[str, Any] = {"type": "json_schema"}
JSON = {"type": "json_object"}
TEXT_BY_SCHEMA = {"type": "text", "json_schema": {"schema": {"type": "integer"}}}
STORY = "Once upon a time"


def chat_of(events: list[dict[str, Any]], index: int = 0) -> str:
    choices = [each for event in events for each in event["choices"] if each["index"] == index]
    return "".join(each["delta"].get("content", "") for each in choices)


def text_of(events: list[dict[str, Any]], index: int = 0) -> str:
    choices = [each for event in events for each in event["choices"] if each["index"] == index]
    return "".join(each["text"] for each in choices)


@pytest.mark.feature("W1")
def test_a_chat_has_openais_form(server: Served) -> None:
    answer = server.post(CHAT, QUESTION | {"model": "demo", "seed": 1})
    body = answer.json
    assert (answer.status, body["object"], body["model"]) == (200, "chat.completion", "demo")
    assert body["id"].startswith("chatcmpl-") and isinstance(body["created"], int)
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "5", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    usage = body["usage"]
    assert (usage["completion_tokens"], usage["total_tokens"]) == (2, usage["prompt_tokens"] + 2)


@pytest.mark.feature("W1")
def test_a_stream_of_a_chat_has_openais_chunks(server: Served) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    answer = server.post(CHAT, QUESTION | options)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    first, *middle, last, usage = answer.events
    same = ("id", "object", "created", "model")
    assert len({tuple(each[name] for name in same) for each in answer.events}) == 1
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [each["choices"][0]["delta"] for each in middle] == [{"content": "5"}]
    assert [each["choices"][0]["finish_reason"] for each in (first, *middle)] == [None, None]
    assert last["choices"][0]["delta"] == {} and last["choices"][0]["finish_reason"] == "stop"
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 2
    assert all(each["usage"] is None for each in (first, *middle, last))


def test_usage_is_in_no_chunk_or_in_each(server: Served) -> None:
    plain = server.post(CHAT, QUESTION | {"stream": True}).events
    assert not any("usage" in each for each in plain)
    options = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    counts = [
        each["usage"]["completion_tokens"] for each in server.post(CHAT, QUESTION | options).events
    ]
    assert counts == [0, 1, 2] or counts == [0, 2, 2]


def test_timings_are_the_servers_and_come_with_the_last_chunk(server: Served) -> None:
    for path, body in ((CHAT, QUESTION), (TEXT, {"prompt": "Once upon", "max_tokens": 8})):
        options = {"stream": True, "stream_options": {"include_timings": True}}
        start = time.monotonic()
        events = server.post(path, body | options).events
        most = time.monotonic() - start
        assert not any("timings" in each or "usage" in each for each in events[:-1])
        timings = events[-1]["timings"]
        assert "usage" not in events[-1] and events[-1]["choices"] == []
        assert 0 < timings["ttft"] <= timings["total"] < most
        options["stream_options"]["include_usage"] = True
        last = server.post(path, body | options).events[-1]
        rate, total = last["timings"]["tokens_per_second"], last["timings"]["total"]
        assert rate * total == pytest.approx(last["usage"]["completion_tokens"])


@pytest.mark.feature("W1")
@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 30},
        {"max_tokens": 30, "temperature": 1.0, "seed": 5, "n": 3, "top_p": 0.9},
        {"max_tokens": 60, "stop": ["girl", "zebra"]},
        {"max_tokens": 60, "stop": "girl", "include_stop_str_in_output": True, "n": 2},
        {"max_tokens": 9, "temperature": 1.5, "seed": 2, "ignore_eos": True, "min_p": 0.01},
    ],
    ids=str,
)
def test_a_stream_adds_up_to_the_whole_answer(server: Served, fields: dict[str, Any]) -> None:
    body = {"prompt": STORY, **fields}
    whole = server.post(TEXT, body).json
    events = server.post(TEXT, body | {"stream": True}).events
    for choice in whole["choices"]:
        index = choice["index"]
        assert text_of(events, index) == choice["text"]
        (end,) = (
            each
            for event in events
            for each in event["choices"]
            if each["index"] == index and each["finish_reason"]
        )
        assert (end["finish_reason"], end["stop_reason"], end["text"]) == (
            choice["finish_reason"],
            choice["stop_reason"],
            "",
        )
    assert len(whole["choices"]) == fields.get("n", 1)
    if "stop" in fields:
        assert whole["choices"][0]["stop_reason"] == "girl"
        keeps = "include_stop_str_in_output" in fields
        assert ("girl" in whole["choices"][0]["text"]) == keeps


def test_prompts_come_in_four_forms_and_answers_in_their_order(server: Served) -> None:
    ids = server.post("/tokenize", {"prompt": STORY}).json["tokens"]
    other = server.post("/tokenize", {"prompt": "23 + 48 ="}).json["tokens"]
    options = {"max_tokens": 5}
    one = server.post(TEXT, options | {"prompt": STORY}).json["choices"][0]["text"]
    sums = server.post(TEXT, options | {"prompt": "23 + 48 ="}).json["choices"][0]["text"]
    assert sums.startswith(" 71")
    for prompt in (ids, [STORY], [ids]):
        assert server.post(TEXT, options | {"prompt": prompt}).json["choices"][0]["text"] == one
    both = server.post(TEXT, options | {"prompt": [ids, other], "n": 2}).json
    assert [each["text"] for each in both["choices"]] == [one, one, sums, sums]
    assert [each["index"] for each in both["choices"]] == [0, 1, 2, 3]
    assert both["usage"]["prompt_tokens"] == len(ids) + len(other)
    events = server.post(TEXT, options | {"prompt": [STORY, "23 + 48 ="], "stream": True}).events
    assert [text_of(events, 0), text_of(events, 1)] == [one, sums]


def test_list_content_and_template_variables_reach_the_template(server: Served) -> None:
    plain = server.post(CHAT, QUESTION).json
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "2 + 3?"}]
    body = {"messages": [{"role": "user", "content": parts}]}
    kwargs = {"chat_template_kwargs": {"enable_thinking": False}}
    assert (
        server.post(CHAT, body | kwargs).json["usage"]["prompt_tokens"]
        == (plain["usage"]["prompt_tokens"])
    )
    error = server.post(CHAT, body | {"chat_template_kwargs": {"tokenize": True}}).error
    assert error["param"] == "chat_template_kwargs"
    assert "may not set tokenize" in error["message"]


def test_cached_tokens_are_in_the_usage_and_salts_keep_them_apart(server: Served) -> None:
    prompt = "The king and the queen lived in a castle by the sea, and every day they sang. " * 2

    def cached(**fields: Any) -> int:
        body = {"prompt": prompt, "max_tokens": 3, **fields}
        details = server.post(TEXT, body).json["usage"]["prompt_tokens_details"]
        return int(details["cached_tokens"])

    assert cached(cache_salt="one") == 0
    assert cached(cache_salt="one") >= 32
    assert cached(cache_salt="two") == 0


def test_several_answers_on_a_cold_cache_are_alike_whole_and_streamed(server: Served) -> None:
    messages = [{"role": "user", "content": "The king and the queen lived in a castle. " * 2}]
    body = {"messages": messages, "n": 2, "seed": 5, "temperature": 1.0, "max_tokens": 8}
    body |= {"logprobs": True, "top_logprobs": 1}
    whole = server.post(CHAT, body | {"cache_salt": "whole"}).json
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *events, last = server.post(CHAT, body | options | {"cache_salt": "streamed"}).events
    assert last["usage"] == whole["usage"]
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    for choice in whole["choices"]:
        index = choice["index"]
        assert chat_of(events, index) == choice["message"]["content"]
        pieces = [each for event in events for each in event["choices"] if each["index"] == index]
        parts = [each["logprobs"] for each in pieces if each["logprobs"]]
        streamed = [token for part in parts for token in part["content"]]
        content = choice["logprobs"]["content"]
        assert [each["token"] for each in streamed] == [each["token"] for each in content]
        # A step with other rows in it, or a cached prompt, rounds the last digits otherwise.
        logprobs = [each["logprob"] for each in content]
        assert [each["logprob"] for each in streamed] == pytest.approx(logprobs, abs=1e-4)


def test_logprobs_of_a_chat(server: Served) -> None:
    body = QUESTION | {"logprobs": True, "top_logprobs": 3}
    whole = server.post(CHAT, body).json["choices"][0]["logprobs"]["content"]
    assert [each["token"] for each in whole] == ["5", "<|im_end|>"]
    for each in whole:
        top = each["top_logprobs"]
        assert len(top) == 3 and top[0]["token"] == each["token"]
        assert each["logprob"] == top[0]["logprob"] > top[1]["logprob"] > top[2]["logprob"]
        assert bytes(each["bytes"]).decode() == each["token"]
    events = server.post(CHAT, body | {"stream": True}).events
    parts = [each["choices"][0]["logprobs"] for each in events]
    streamed = [token for part in parts if part for token in part["content"]]
    assert [each["token"] for each in streamed] == [each["token"] for each in whole]
    none = server.post(CHAT, QUESTION | {"logprobs": True}).json["choices"][0]["logprobs"]
    assert [each["top_logprobs"] for each in none["content"]] == [[], []]


def test_echo_scores_the_prompt_as_generating_it_did(server: Served) -> None:
    made = server.post(
        TEXT, {"prompt": STORY, "max_tokens": 8, "logprobs": 1, "temperature": 0}
    ).json["choices"][0]
    ids = server.post("/tokenize", {"prompt": STORY + made["text"]}).json["tokens"]
    # as lm-eval asks: one token more than the prompt, which it leaves out
    body = {"prompt": [ids], "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    echoed = server.post(TEXT, body | {"seed": 1234}).json["choices"][0]
    logprobs = echoed["logprobs"]
    sizes = {name: len(values) for name, values in logprobs.items()}
    assert set(sizes.values()) == {len(ids) + 1}
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    scores = logprobs["token_logprobs"][-9:-1]
    assert scores == pytest.approx(made["logprobs"]["token_logprobs"], abs=1e-4)
    greedy = [
        score == max(top.values())
        for score, top in zip(scores, logprobs["top_logprobs"][-9:-1], strict=True)
    ]
    assert greedy == [True] * 8
    text = echoed["text"]
    assert text.startswith(STORY + made["text"])
    ends = [*logprobs["text_offset"][1:], len(text)]
    cut = [text[a:b] for a, b in zip(logprobs["text_offset"], ends, strict=True)]
    assert cut == logprobs["tokens"]


@pytest.mark.feature("W1")
def test_tokens_of_completions_come_as_ids_beside_and_instead_of_texts(server: Served) -> None:
    asked: dict[str, Any] = {"prompt": ["Once upon", "23 + 48 ="], "max_tokens": 5, "n": 1}
    asked |= {"return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs": 2}
    choices = server.post(TEXT, asked).json["choices"]
    prompts = [
        server.post("/tokenize", {"prompt": each}).json["tokens"] for each in asked["prompt"]
    ]
    assert [each["prompt_token_ids"] for each in choices] == prompts
    for choice in choices:
        names = [f"token_id:{each}" for each in choice["token_ids"]]
        assert choice["logprobs"]["tokens"] == names
        for name, top in zip(names, choice["logprobs"]["top_logprobs"], strict=True):
            assert name in top and all(each.startswith("token_id:") for each in top)
        plain = server.post("/detokenize", {"tokens": choice["token_ids"]}).json["prompt"]
        assert plain.removesuffix("<|im_end|>").startswith(choice["text"])
    del asked["logprobs"]
    streamed: dict[int, dict[str, list[int]]] = {0: {}, 1: {}}
    for event in server.post(TEXT, asked | {"stream": True}).events:
        for choice in event["choices"]:
            ids = streamed[choice["index"]]
            assert ("prompt_token_ids" in choice) == (not ids and "token_ids" in choice)
            for name in ("prompt_token_ids", "token_ids"):
                ids[name] = ids.get(name, []) + choice.get(name, [])
    assert [streamed[index]["token_ids"] for index in (0, 1)] == [
        each["token_ids"] for each in choices
    ]
    assert [streamed[index]["prompt_token_ids"] for index in (0, 1)] == prompts
    chat = {"logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
    (first, *_) = server.post(CHAT, QUESTION | chat).json["choices"][0]["logprobs"]["content"]
    assert first["token"] == first["top_logprobs"][0]["token"]
    assert first["token"].startswith("token_id:") and first["bytes"] == list(b"5")


def test_the_last_tokens_of_a_prompt_are_kept(server: Served) -> None:
    ids = server.post("/tokenize", {"prompt": "One two three. 23 + 48 ="}).json["tokens"]
    asked = {"max_tokens": 4, "truncate_prompt_tokens": 6, "return_token_ids": True}
    cut = server.post(TEXT, {"prompt": "One two three. 23 + 48 ="} | asked).json
    assert cut == server.post(TEXT, {"prompt": ids} | asked).json | {
        "id": cut["id"],
        "created": cut["created"],
        "usage": cut["usage"],
    }
    assert cut["choices"][0]["prompt_token_ids"] == ids[-6:]
    assert cut["usage"]["prompt_tokens"] == 6
    echoed = server.post(TEXT, {"prompt": ids, "echo": True} | asked).json["choices"][0]
    assert echoed["text"].startswith(
        server.post("/detokenize", {"tokens": ids[-6:]}).json["prompt"]
    )
    whole = server.post(CHAT, QUESTION | {"return_token_ids": True}).json
    chat = server.post(CHAT, QUESTION | asked).json
    assert chat["prompt_token_ids"] == whole["prompt_token_ids"][-6:]
    refused = server.post(TEXT, {"prompt": "a", "truncate_prompt_tokens": 0}).error
    assert refused["param"] == "truncate_prompt_tokens"


@pytest.mark.feature("W1")
def test_log_probabilities_of_a_prompt_have_the_form_of_vllm(server: Served) -> None:
    ids = server.post("/tokenize", {"prompt": STORY}).json["tokens"]
    body = {"prompt": [[5, 6], ids], "max_tokens": 2, "temperature": 0, "n": 2}
    echoed = server.post(TEXT, body | {"echo": True, "logprobs": 3}).json["choices"]
    found = server.post(TEXT, body | {"prompt_logprobs": 2}).json["choices"]
    for prompt, choice, other in zip([[5, 6]] * 2 + [ids] * 2, found, echoed, strict=True):
        assert choice["logprobs"] is None and other["text"].endswith(choice["text"])
        first, *tables = choice["prompt_logprobs"]
        assert first is None and len(tables) == len(prompt) - 1
        scores = other["logprobs"]["token_logprobs"][1:]
        for token, table, score in zip(prompt[1:], tables, scores, strict=False):
            assert table[str(token)]["logprob"] == pytest.approx(score, abs=1e-4)
            others = {each["rank"] for id, each in table.items() if id != str(token)}
            assert others <= {1, 2} and len(table) <= 3 and next(iter(table)) == str(token)
    both = server.post(TEXT, body | {"echo": True, "logprobs": 1, "prompt_logprobs": 2}).json
    assert both["choices"][2]["prompt_logprobs"][1].keys() == found[2]["prompt_logprobs"][1].keys()
    assert all(len(top) <= 2 for top in both["choices"][2]["logprobs"]["top_logprobs"][1:])

    chat = server.post(CHAT, QUESTION | {"prompt_logprobs": 0}).json
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert {len(table) for table in chat["prompt_logprobs"][1:]} == {1}
    for wrong in ({"prompt_logprobs": 21}, {"prompt_logprobs": 1, "stream": True}):
        assert server.post(CHAT, QUESTION | wrong).error["param"] == "prompt_logprobs"


def test_echo_alone_gives_the_prompt_back(server: Served) -> None:
    body = {"prompt": STORY, "echo": True, "max_tokens": 0, "logprobs": 0}
    answer = server.post(TEXT, body).json
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (STORY, "length")
    assert answer["usage"]["completion_tokens"] == 0
    assert len(choice["logprobs"]["tokens"]) == answer["usage"]["prompt_tokens"]
    streamed = {"prompt": STORY, "echo": True, "max_tokens": 4, "stream": True, "logprobs": 1}
    whole = server.post(TEXT, streamed | {"stream": False}).json["choices"][0]
    events = server.post(TEXT, streamed).events
    assert text_of(events) == whole["text"]
    offsets = [
        at
        for event in events
        for at in (event["choices"][0]["logprobs"] or {"text_offset": []})["text_offset"]
    ]
    assert offsets == whole["logprobs"]["text_offset"]


def test_minus_infinity_is_a_number(server: Served) -> None:
    body = {"prompt": STORY, "max_tokens": 1, "allowed_token_ids": [5], "logprobs": 3}
    answer = server.post(TEXT, body)
    (top,) = answer.json["choices"][0]["logprobs"]["top_logprobs"]
    assert all(math.isfinite(each) for each in top.values())
    assert min(top.values()) >= -9999.0


@pytest.mark.parametrize(
    ("path", "fields", "status", "param"),
    [
        (TEXT, {"prompt": ""}, 400, "prompt"),
        (TEXT, {"prompt": []}, 400, "prompt"),
        (TEXT, {"prompt": [768]}, 400, "prompt"),
        (TEXT, {"prompt": [-1]}, 400, "prompt"),
        (TEXT, {"prompt": "\ud800"}, 400, None),
        (TEXT, {"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
        (TEXT, {"prompt": "a", "temperature": 2.1}, 400, "temperature"),
        (TEXT, {"prompt": "a", "logprobs": 21}, 400, "logprobs"),
        (TEXT, {"prompt": "a", "allowed_token_ids": [768]}, 400, "allowed_token_ids"),
        (TEXT, {"prompt": "a", "logit_bias": {"768": 1}}, 400, "logit_bias"),
        (TEXT, {"prompt": "a", "logit_bias": {"5": 1e39}}, 400, "logit_bias"),
        (TEXT, {"prompt": "a", "min_tokens": 99}, 400, "min_tokens"),
        (TEXT, {"prompt": "a", "cache_salt": ""}, 400, "cache_salt"),
        (TEXT, {"prompt": "a", "model": "gpt-4"}, 404, "model"),
        (TEXT, {"prompt": "a", "user": "x" * 513}, 400, "user"),
        (TEXT, {"prompt": "a", "extra_args": {"ban": 1}}, 400, "extra_args"),
        (CHAT, QUESTION | {"extra_args": {"ban": 2**63}}, 400, "extra_args"),
        (CHAT, {"messages": []}, 400, "messages"),
        (CHAT, QUESTION | {"cache_salt": ""}, 400, "cache_salt"),
        (CHAT, {"messages": [{"role": "user", "content": "7" * 3500}]}, 400, "messages"),
        (CHAT, QUESTION | {"max_completion_tokens": 0}, 400, "max_completion_tokens"),
        (CHAT, QUESTION | {"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
        (CHAT, QUESTION | {"tools": [{"type": "function"}]}, 400, "tools[0].function"),
        (CHAT, QUESTION | {"tools": [FUNCTION]}, 400, "tools"),
        (CHAT, QUESTION | {"tools": [FUNCTION] * 2}, 400, "tools"),
        (CHAT, QUESTION | {"tool_choice": "required"}, 400, "tool_choice"),
        (CHAT, QUESTION | {"tools": [FUNCTION], "tool_choice": OTHER}, 400, "tool_choice"),
        (CHAT, QUESTION | {"store": True, "max_token": 5}, 400, "max_token"),
        (CHAT, QUESTION | {"continue_final_message": True}, 400, "continue_final_message"),
        (CHAT, QUESTION | {"response_format": {"type": "xml"}}, 400, "response_format.type"),
        (CHAT, QUESTION | {"response_format": SCHEMA_ALONE}, 400, "response_format.json_schema"),
        (CHAT, QUESTION | {"response_format": TEXT_BY_SCHEMA}, 400, "response_format.json_schema"),
        (
            TEXT,
            {"prompt": "a", "response_format": JSON, "structured_outputs": {"regex": "a"}},
            400,
            "structured_outputs",
        ),
        (TEXT, {"prompt": ["a", "7" * 3500]}, 400, "prompt"),
        ("/v1/embeddings", {"input": [[5], [768]]}, 400, "input"),
        ("/v1/embeddings", {"input": [[5] * 290] * 2}, 400, "input"),
        ("/v1/responses", {"input": "a", "max_tool_calls": 0}, 400, "max_tool_calls"),
        (
            "/v1/responses",
            {"input": "a", "text": {"format": {"type": "text", "schema": {}}}},
            400,
            "text.format.schema",
        ),
        ("/tokenize", {"prompt": "a", "tools": [FUNCTION]}, 400, "tools"),
        (
            "/tokenize",
            {"prompt": "a", "chat_template_kwargs": {"a": 1}},
            400,
            "chat_template_kwargs",
        ),
        ("/tokenize", QUESTION | {"add_special_tokens": True}, 400, "add_special_tokens"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/detokenize", {"tokens": [5, -1]}, 400, "tokens"),
        (TEXT, {"prompt": "a", "structured_outputs": {}}, 400, "structured_outputs"),
        (TEXT, {"prompt": "a", "structured_outputs": {"regex": "("}}, 400, "structured_outputs"),
        (CHAT, {"messages": [{"role": "user"}]}, 400, "messages"),
    ],
    ids=lambda each: json.dumps(each)[:60] if isinstance(each, dict) else "",
)
def test_what_cannot_be_served_is_an_error_that_names_it(
    server: Served, path: str, fields: dict[str, Any], status: int, param: str | None
) -> None:
    answer = server.post(path, fields)
    assert (answer.status, answer.error["param"]) == (status, param), answer.body
    assert answer.error["type"] == "invalid_request_error"
    assert "0x" not in answer.error["message"] and "/work" not in answer.error["message"]
    if param in ("max_completion_tokens", "top_logprobs"):
        assert answer.error["message"].startswith(param)


def test_a_streamed_request_that_is_refused_is_a_plain_error(server: Served) -> None:
    answer = server.post(TEXT, {"prompt": [768], "stream": True})
    assert answer.status == 400 and answer.error["param"] == "prompt"
    assert answer.headers["content-type"] == "application/json"


@pytest.mark.feature("W2")
@pytest.mark.parametrize(
    ("path", "body", "names"),
    [
        (
            CHAT,
            {
                "messages": [{"role": "user", "content": "Hi", "id": "m1", "cache_control": {}}],
                "metadata": {"a": "b"},
                "store": True,
                "service_tier": "flex",
                "verbosity": "low",
                "reasoning_effort": "low",
            },
            "messages[].cache_control, messages[].id, metadata, reasoning_effort, service_tier, "
            "store, verbosity",
        ),
        (TEXT, {"prompt": "Hi", "metadata": {"a": "b"}, "store": True}, "metadata, store"),
        (
            "/v1/responses",
            {"input": "Hi", "reasoning": {"effort": "low"}, "text": {"verbosity": "low"}},
            "reasoning.effort, text.verbosity",
        ),
    ],
)
def test_fields_that_change_no_token_are_named_in_the_response_and_once_in_the_log(
    server: Served, path: str, body: dict[str, Any], names: str
) -> None:
    for stream in (False, True):
        answer = server.post(path, body | {"stream": stream, "temperature": 0, "top_k": 5.0})
        assert answer.status == 200 and answer.headers["x-ignored-fields"] == names
    for name in names.split(", "):
        field = f'field="{name}"' if "[" in name else f"field={name}"
        line = server.wait_for_error(f"{field}\n")
        assert "a field of a request has no effect" in line
        assert len([each for each in server.errors if each.endswith(f"{field}\n")]) == 1
    plain = server.post(TEXT, {"prompt": "Hi", "max_tokens": 2})
    assert "x-ignored-fields" not in plain.headers


@pytest.mark.feature("W1")
@pytest.mark.full
def test_echo_gives_the_log_probabilities_of_transformers(server: Served) -> None:
    import torch  # not with the others: they take seconds to import
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    for text in (STORY + ", there was a", "23 + 48 = 71.", "zebra quartz\nx = [1, 2]"):
        ids = server.post("/tokenize", {"prompt": text}).json["tokens"]
        body = {"prompt": ids, "echo": True, "logprobs": 1, "max_tokens": 1}
        found = server.post(TEXT, body).json["choices"][0]["logprobs"]["token_logprobs"]
        with torch.no_grad():
            scores = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        wanted = scores[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
        assert found[1:-1] == pytest.approx(wanted, abs=1e-3)


def test_the_load_is_the_number_of_requests_in_progress(server: Served) -> None:
    endless = {"prompt": "Once upon", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with contextlib.closing(server.post_raw(TEXT, endless)):
        while server.get("/load").json != {"server_load": 1}:
            time.sleep(0.01)
    while server.get("/load").json != {"server_load": 0}:
        time.sleep(0.01)


def test_models_tokens_and_versions(server: Served) -> None:
    cards = server.get("/v1/models").json
    assert [each["id"] for each in cards["data"]] == ["demo", "org/demo"]
    card = server.get("/v1/models/org/demo").json
    assert (card["object"], card["max_model_len"]) == ("model", 2048)
    missing = server.get("/v1/models/org/other")
    assert (missing.status, missing.error["code"]) == (404, "model_not_found")
    tokens = server.post(
        "/tokenize", {"prompt": "Once upon", "return_token_strs": True, "model": "demo"}
    ).json
    assert (tokens["count"], tokens["token_strs"]) == (2, ["Once", " upon"])
    text = server.post("/detokenize", {"tokens": tokens["tokens"]}).json
    assert text == {"prompt": "Once upon"}
    rendered = server.post("/tokenize", QUESTION).json
    shown = server.post("/detokenize", {"tokens": rendered["tokens"]}).json["prompt"]
    assert shown == "<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n<|im_start|>assistant\n"
    info = server.get("/tokenizer_info").json
    assert (info["tokenizer_class"], info["model_max_length"]) == ("PreTrainedTokenizerFast", 4096)
    assert (info["eos_token"], info["pad_token"]) == ("<|im_end|>", "<|endoftext|>")
    assert info["bos_token"] is None and info["chat_template"].startswith("{% for message in")
    assert server.post("/detokenize", {"tokens": [768]}).error["param"] is not None
    assert server.post("/tokenize", {}).status == 400
    assert server.get("/version").json.keys() == {"version"}
    assert server.get("/health").json == server.get("/ping").json == {"status": "ok"}
    assert server.ask("POST", "/ping").status == 200
    assert server.get("/v1/engines").error["message"] == "there is nothing at /v1/engines"
    wrong = server.get(CHAT)
    assert wrong.status == 405 and wrong.headers["allow"] == "POST" and wrong.error
