"""`/v1/rerank` and `/v1/score` over a real socket, from the vectors of the demo model."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from served import CHECKPOINT, Served, serve

from headstock.requests.score_request import ScoreRequest
from headstock.text.prompt import Prompt
from headstock_openai_server.routes.embeddings import SingleUpdateGeneration

RERANK, SCORE = "/v1/rerank", "/v1/score"
QUERY = "Once upon a time"
DOCUMENTS = ["12 + 30 =", "Once upon a time", "The capital"]


def cosine(server: Served, one: str, other: str) -> float:
    """That of two texts' vectors, by `/v1/embeddings`."""
    data = server.post("/v1/embeddings", {"input": [one, other]}).json["data"]
    first, second = (each["embedding"] for each in data)
    return sum(a * b for a, b in zip(first, second, strict=True))


@pytest.mark.feature("W17")
def test_documents_come_best_first_with_their_places_and_texts(server: Served) -> None:
    answer = server.post(RERANK, {"model": "demo", "query": QUERY, "documents": DOCUMENTS})
    body = answer.json
    texts = [QUERY, *DOCUMENTS]
    count = sum(server.post("/tokenize", {"prompt": text}).json["count"] for text in texts)

    assert answer.status == 200 and body.keys() == {"id", "model", "results", "usage"}
    assert body["id"].startswith("rerank-") and body["model"] == "demo"
    assert body["usage"] == {"prompt_tokens": count, "total_tokens": count}
    assert [each["document"] for each in body["results"]] == [
        {"text": DOCUMENTS[each["index"]]} for each in body["results"]
    ]
    scores = [each["relevance_score"] for each in body["results"]]
    assert sorted(scores, reverse=True) == scores
    assert body["results"][0]["index"] == 1 and scores[0] == pytest.approx(1.0, abs=1e-5)
    for each in body["results"]:
        wanted = cosine(server, QUERY, DOCUMENTS[each["index"]])
        assert each["relevance_score"] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.feature("W17")
def test_a_request_may_want_few_results_without_texts_of_documents_as_objects(
    server: Served,
) -> None:
    wanted = {"query": QUERY, "documents": [{"text": "b"}, *DOCUMENTS[1:]]}
    for path in ("/rerank", "/v2/rerank"):
        answer = server.post(path, wanted | {"top_n": 1, "return_documents": False})
        assert answer.status == 200, answer.body
        (result,) = answer.json["results"]
        assert result.keys() == {"index", "relevance_score"} and result["index"] == 1
    # Equal documents stay in their order.
    body = {"query": QUERY, "documents": ["b", "b", QUERY], "top_n": 0}
    assert [each["index"] for each in server.post(RERANK, body).json["results"]] == [2, 0, 1]


@pytest.mark.feature("W17")
def test_pairs_are_scored_in_their_order(server: Served) -> None:
    one = server.post(SCORE, {"text_1": QUERY, "text_2": DOCUMENTS})
    assert one.status == 200, one.body
    assert one.json.keys() == {"id", "object", "created", "model", "data", "usage"}
    assert (one.json["object"], one.json["model"]) == ("list", "demo")
    wanted = [cosine(server, QUERY, text) for text in DOCUMENTS]
    for index, (each, score) in enumerate(zip(one.json["data"], wanted, strict=True)):
        assert (each["object"], each["index"]) == ("score", index)
        assert each["score"] == pytest.approx(score, abs=1e-5)

    pairs = {"queries": [QUERY, "The capital"], "documents": ["12 + 30 =", "The capital"]}
    two = server.post("/score", pairs).json["data"]
    assert [each["score"] for each in two] == pytest.approx([wanted[0], 1.0], abs=1e-5)
    single = server.post(SCORE, {"text_1": QUERY, "text_2": "12 + 30 ="}).json["data"]
    assert [each["score"] for each in single] == pytest.approx([wanted[0]], abs=1e-5)


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        (RERANK, {"documents": []}, "documents", "documents is an empty list"),
        (RERANK, {"documents": ["a", ""]}, "documents", "documents[1] is empty"),
        (RERANK, {"documents": ["a"] * 4}, "documents", "has 4 entries; at most 3 are taken"),
        (RERANK, {"documents": ["a", [1]]}, "documents[1]", "documents[1] is not valid"),
        (RERANK, {"documents": [{"text": "a", "image": "b"}]}, "documents[0].image", "not a known"),
        (RERANK, {"documents": ["a", "7" * 3500]}, "documents", "documents[1]: prompt has"),
        (RERANK, {"query": ""}, "query", "query is empty"),
        (RERANK, {"query": "\ud800"}, None, "not valid JSON"),
        (RERANK, {"top_n": -1}, "top_n", "top_n is -1"),
        (RERANK, {"max_tokens_per_doc": 0}, "max_tokens_per_doc", "give 1 or more"),
        (RERANK, {"instruction": "find"}, "instruction", "not supported where vectors"),
        (RERANK, {"prompt_name": "query"}, "prompt_name", "names no instruction"),
        (RERANK, {"rank_fields": ["title"]}, "rank_fields", "rank_fields is not supported"),
        (RERANK, {"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "max_tokens_per_doc"),
        (RERANK, {"use_activation": False}, "use_activation", "use_activation is not supported"),
        (SCORE, {}, "text_1", "text_1 is missing"),
        (SCORE, {"text_1": "a"}, "text_2", "text_2 is missing"),
        (SCORE, {"text_1": "a", "queries": "b"}, "text_1", "give one pair"),
        (SCORE, {"text_1": ["a", "b"], "text_2": ["a"]}, "text_1", "as many as text_2 (1), got 2"),
        (SCORE, {"text_1": ["a", ""], "text_2": ["a", "b"]}, "text_1", "text_1[1] is empty"),
        (SCORE, {"text_1": [], "text_2": ["a"]}, "text_1", "text_1 is an empty list"),
        (SCORE, {"text_1": "a", "text_2": ["a", 3]}, "text_2[1]", "text_2[1] is not valid"),
    ],
)
def test_what_is_wrong_is_refused_by_name(
    server: Served, path: str, body: dict[str, Any], param: str | None, says: str
) -> None:
    whole = {"query": QUERY, "documents": ["a"]} if path == RERANK else {}
    answer = server.post(path, whole | body)

    assert answer.status == 400, answer.body
    assert answer.error["param"] == param and says in answer.error["message"]


def test_more_than_may_wait_names_the_documents(server: Served) -> None:
    text = "7" * 200
    answer = server.post(RERANK, {"query": "a", "documents": [text, text]})

    assert answer.status == 400 and answer.error["param"] == "documents"
    assert "tokens, and 300 may wait at once" in answer.error["message"]


def test_a_prompt_waits_once_for_both_of_its_tokens() -> None:
    requests = [ScoreRequest(str(each), Prompt(None, [5, 6, 7]), 1, 2) for each in range(2)]
    service: Any = None
    alike: Any = requests
    generation = SingleUpdateGeneration(service, alike, streams=False)

    assert len(generation.live) == 4
    assert sum(generation.unstarted.values()) == generation.num_prompt_tokens == 6


def test_documents_are_cut_only_when_asked(server: Served) -> None:
    body = {"query": QUERY, "documents": ["7" * 3000, "ab"], "max_tokens_per_doc": 20}
    answer = server.post(RERANK, body)

    assert answer.status == 200, answer.body
    assert answer.json["usage"]["prompt_tokens"] < 60
    assert len(answer.json["results"][1]["document"]["text"]) in (3000, 2)


def test_another_model_is_not_found(server: Served) -> None:
    body = {"query": "a", "documents": ["b"], "model": "gpt"}
    assert server.post(RERANK, body).status == 404


def test_scores_are_logged_and_counted(server: Served) -> None:
    name = {"x-request-id": "scores-logged"}
    body = {"query": QUERY, "documents": ["a", "b"]}
    assert server.post(RERANK, body, headers=name).status == 200
    line = server.wait_for_line(id="scores-logged")  # a line may come after its answer

    assert (line["status"], line["completion_tokens"]) == (200, 0)
    assert line["finish"] == ["stop"] * 3 and line["prompt_tokens"] > 0


@pytest.mark.full
@pytest.mark.feature("W17")
def test_tokens_that_a_checkpoint_names_score_documents(tmp_path: Path) -> None:
    directory = shutil.copytree(CHECKPOINT, tmp_path / "model")
    modules = [{"type": "x.Transformer", "path": ""}, {"type": "x.LogitScore", "path": "score"}]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "score").mkdir()
    tokens = {"true_token_id": 91, "false_token_id": 80}
    (directory / "score" / "config.json").write_text(json.dumps(tokens))
    (directory / "chat_template.jinja").write_text(
        "{% for m in messages if m.role in ('query', 'document') %}{{ m.content }}|{% endfor %}"
    )
    with serve("--model", str(directory), "--num-pages", "64") as server:
        answer = server.post(RERANK, {"query": QUERY, "documents": DOCUMENTS})
        assert answer.status == 200, answer.body
        scores = {each["index"]: each["relevance_score"] for each in answer.json["results"]}
        assert len(scores) == 3 and all(0 < score < 1 for score in scores.values())
        for index, text in enumerate(DOCUMENTS):
            prompt = {"prompt": f"{QUERY}|{text}|", "max_tokens": 1, "temperature": 0}
            odds = []
            for token in tokens.values():
                allowed = prompt | {"allowed_token_ids": [token], "logprobs": 0}
                (choice,) = server.post("/v1/completions", allowed).json["choices"]
                odds += choice["logprobs"]["token_logprobs"]
            assert scores[index] == pytest.approx(1 / (1 + math.exp(odds[1] - odds[0])), abs=1e-5)
        refused = server.post("/v1/embeddings", {"input": "a"})
        assert refused.status == 400 and "LogitScore" in refused.error["message"]
