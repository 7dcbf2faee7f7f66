"""The published document says what the server takes and answers."""

from __future__ import annotations

import json
import re

import pytest
from served import Served

from headstock_openai_server.api.openapi import OPERATIONS, make_document
from headstock_openai_server.api.responses_body import ResponsesBody
from headstock_openai_server.api.schema import ChatBody, CompletionBody, EmbeddingBody
from headstock_openai_server.api.unserved import UNSERVED


@pytest.mark.parametrize("has_keys", [False, True])
def test_every_reference_leads_to_a_schema(has_keys: bool) -> None:
    document = make_document(has_keys=has_keys)
    named = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert named <= document["components"]["schemas"].keys()
    assert {"ChatBody", "ChatMessage", "Usage", "ErrorBody"} <= named
    secured = [path for path, each in document["paths"].items() if '"security"' in json.dumps(each)]
    assert len(secured) == (len(document["paths"]) - 2 if has_keys else 0)


@pytest.mark.feature("W2")
def test_fields_that_are_refused_are_not_offered_and_all_others_are() -> None:
    schemas = make_document(has_keys=False)["components"]["schemas"]
    for kind in (ChatBody, CompletionBody, EmbeddingBody, ResponsesBody):
        offered = schemas[kind.__name__]["properties"].keys()
        assert offered == set(kind.__struct_fields__) - set(UNSERVED[kind])
        assert schemas[kind.__name__]["additionalProperties"] is False
    assert {"messages", "max_completion_tokens", "top_k"} <= schemas["ChatBody"][
        "properties"
    ].keys()
    assert schemas["ChatBody"]["required"] == ["messages"]


def test_the_document_is_served_and_has_every_route(server: Served) -> None:
    document = server.get("/openapi.json").json
    assert document == make_document(has_keys=True)
    assert {path for _, path in OPERATIONS} == document["paths"].keys()
    for method, path in OPERATIONS:
        status = server.ask(method.upper(), path.replace("{id}", "demo")).status
        assert status == (415 if method == "post" else 200), path
