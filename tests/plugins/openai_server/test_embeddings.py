"""`/v1/embeddings` over a real socket, from the demo model in a process of its own."""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np
import pytest
from served import Served

PATH = "/v1/embeddings"
TEXTS = ["Once upon a time", "12 + 30 =", "The capital of France"]


def vectors(server: Served, given: Any, **more: Any) -> list[list[float]]:
    """The vectors of an input, in order."""
    answer = server.post(PATH, {"input": given, "encoding_format": "float"} | more)
    assert answer.status == 200, answer.body
    assert [each["index"] for each in answer.json["data"]] == list(range(len(answer.json["data"])))
    return [each["embedding"] for each in answer.json["data"]]


@pytest.mark.feature("W6")
def test_an_answer_has_openais_form(server: Served) -> None:
    answer = server.post(PATH, {"input": TEXTS, "model": "demo", "user": "ada"})
    body = answer.json
    count = sum(server.post("/tokenize", {"prompt": text}).json["count"] for text in TEXTS)

    assert answer.status == 200 and body.keys() == {"object", "data", "model", "usage"}
    assert (body["object"], body["model"]) == ("list", "demo")
    assert body["usage"] == {"prompt_tokens": count, "total_tokens": count}
    for index, each in enumerate(body["data"]):
        assert each.keys() == {"object", "index", "embedding"}
        assert (each["object"], each["index"]) == ("embedding", index)
        assert math.isclose(math.hypot(*each["embedding"]), 1.0, abs_tol=1e-5)


@pytest.mark.feature("W6")
def test_every_form_of_an_input_gives_the_same_vectors(server: Served) -> None:
    ids = [server.post("/tokenize", {"prompt": text}).json["tokens"] for text in TEXTS]
    wanted = vectors(server, TEXTS)

    assert vectors(server, ids) == pytest.approx(np.array(wanted), abs=1e-5)
    assert vectors(server, TEXTS[0]) == pytest.approx(np.array(wanted[:1]), abs=1e-5)
    assert vectors(server, ids[0]) == pytest.approx(np.array(wanted[:1]), abs=1e-5)


@pytest.mark.feature("W6")
def test_base64_holds_the_same_numbers_as_float32(server: Served) -> None:
    plain = vectors(server, TEXTS)
    packed = server.post(PATH, {"input": TEXTS, "encoding_format": "base64"}).json["data"]
    found = [np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in packed]

    np.testing.assert_allclose(found, plain, atol=1e-5)


def test_pooling_and_length_can_be_chosen(server: Served) -> None:
    last, mean = vectors(server, TEXTS[0]), vectors(server, TEXTS[0], pooling="mean")
    unscaled = vectors(server, TEXTS[0], normalize=False)

    assert last != pytest.approx(np.array(mean), abs=1e-2)
    length = math.hypot(*unscaled[0])
    assert length > 2
    assert last[0] == pytest.approx([each / length for each in unscaled[0]], abs=1e-5)


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"dimensions": 8}, "dimensions", "dimensions is not supported; vectors are as long as"),
        ({"input": []}, "input", "input is an empty list"),
        ({"input": ""}, "input", "input: prompt is empty"),
        ({"input": ["a", [1]]}, "input", "input mixes forms"),
        ({"input": [99999999]}, "input", "99999999"),
        (
            {"input": [[1], []]},
            "input",
            "input: prompts[1]: prompt is empty",
        ),
        ({"encoding_format": "hex"}, "encoding_format", "encoding_format is not valid"),
        ({"pooling": "max"}, "pooling", "pooling is not valid"),
        ({"prompt_name": "query"}, "prompt_name", "the checkpoint names no instruction"),
        ({"input_type": "query"}, "input_type", "input_type is not a known field"),
        ({"input": 3}, "input", "input is not valid"),
    ],
)
def test_what_is_wrong_is_refused_by_name(
    server: Served, body: dict[str, Any], param: str, says: str
) -> None:
    answer = server.post(PATH, {"input": "a"} | body)

    assert answer.status == 400
    assert answer.json["error"]["param"] == param and says in answer.json["error"]["message"]


def test_another_model_is_not_found_and_a_body_without_input_is_refused(server: Served) -> None:
    assert server.post(PATH, {"input": "a", "model": "gpt"}).status == 404
    missing = server.post(PATH, {"model": "demo"})
    assert (missing.status, missing.json["error"]["param"]) == (400, "input")


def test_embeddings_are_logged_and_counted(server: Served) -> None:
    name = {"x-request-id": "embeddings-logged"}
    assert server.post(PATH, {"input": TEXTS}, headers=name).status == 200
    line = server.wait_for_line(id="embeddings-logged")  # a line may come after its answer

    assert (line["status"], line["completion_tokens"]) == (200, 0)
    assert line["finish"] == ["stop"] * len(TEXTS) and line["prompt_tokens"] > 0
