"""What sglang-router and vllm-router send and ask."""

from __future__ import annotations

import pytest
from served import Served

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
QUESTION = {"messages": [{"role": "user", "content": "What is 2 + 3?"}], "temperature": 0}
ROUTED = {
    "no_stop_trim": False,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "return_hidden_states": False,
}
"""What sglang-router and vllm-router add to every chat; the first and the last to completions."""


def test_what_routers_add_to_requests_changes_nothing(server: Served) -> None:
    plain = server.post(CHAT, QUESTION).json["choices"]
    assert server.post(CHAT, QUESTION | ROUTED).json["choices"] == plain
    body = {"prompt": "Once upon", "max_tokens": 8, "temperature": 0}
    added = {name: ROUTED[name] for name in ("no_stop_trim", "return_hidden_states")}
    text = server.post(TEXT, body).json["choices"]
    assert server.post(TEXT, body | added).json["choices"] == text


@pytest.mark.parametrize("name", ROUTED)
def test_what_routers_could_ask_and_is_not_served_is_refused(server: Served, name: str) -> None:
    answer = server.post(CHAT, QUESTION | {name: not ROUTED[name]})
    assert (answer.status, answer.error["param"]) == (400, name)


def test_routers_find_the_model_and_its_limits(server: Served) -> None:
    card, *_ = server.get("/v1/models").json["data"]
    for path in ("/server_info", "/get_server_info"):
        info = server.get(path).json
        assert info["served_model_name"] == card["id"] and info["model_path"] == card["root"]
        assert (info["tp_size"], info["dp_size"]) == (1, 1)
        assert info["max_model_len"] == card["max_model_len"]
    for path in ("/model_info", "/get_model_info"):
        info = server.get(path).json
        assert info == {
            "model_path": card["root"],
            "tokenizer_path": card["root"],
            "is_generation": True,
        }
