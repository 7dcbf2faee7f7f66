"""The published document says what the server takes and answers."""

from __future__ import annotations

import html
import json
import re

import jsonschema
import pytest
from served import Served

from headstock_openai_server.api.openapi import make_document
from headstock_openai_server.api.operations import (
    ADMINISTRATION,
    OPEN_PATHS,
    OPERATIONS,
    RESET_PATHS,
)
from headstock_openai_server.api.responses_body import ResponsesBody
from headstock_openai_server.api.schema import ChatBody, CompletionBody, EmbeddingBody
from headstock_openai_server.api.unserved import IGNORED, UNSERVED
from headstock_openai_server.http.document_page import write_document


@pytest.mark.parametrize("has_keys", [False, True])
def test_every_reference_leads_to_a_schema(has_keys: bool) -> None:
    document = make_document(has_keys=has_keys)
    named = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert named <= document["components"]["schemas"].keys()
    assert {"ChatBody", "ChatMessage", "Usage", "ErrorBody"} <= named
    secured = [path for path, each in document["paths"].items() if '"security"' in json.dumps(each)]
    assert len(secured) == (len(document["paths"]) - len(OPEN_PATHS) if has_keys else 0)


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


@pytest.mark.feature("W2")
def test_fields_without_effect_are_offered_unless_they_are_refused() -> None:
    for kind, names in IGNORED.items():
        offered, refused = (
            make_document(has_keys=False, refuses_ignored=refuses)["components"]["schemas"][
                kind.__name__
            ]["properties"]
            for refuses in (False, True)
        )
        assert all("no effect" in offered[name]["description"] for name in names)
        assert offered.keys() - refused.keys() == set(names)


def test_the_document_takes_whole_floats_for_integers_as_the_server_does() -> None:
    document = make_document(has_keys=False)
    schema = document | {"$ref": "#/components/schemas/ChatBody"}
    taken = jsonschema.Draft202012Validator(schema)
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    for value, is_taken in ((16, True), (16.0, True), (16.5, False), ("16", False)):
        assert taken.is_valid(chat | {"max_tokens": value, "top_k": value}) == is_taken


def test_the_document_is_served_and_has_every_route(server: Served) -> None:
    document = server.get("/openapi.json").json
    assert document == make_document(has_keys=True, root_path="/llm")
    operations = {**OPERATIONS, **ADMINISTRATION}
    assert {path for _, path in operations} == document["paths"].keys()
    for (method, path), operation in operations.items():
        if path in RESET_PATHS:
            continue  # they change what other tests find
        text = {"content-type": "text/plain"}
        status = server.ask(method.upper(), path.replace("{id}", "demo"), headers=text).status
        assert status == (200 if operation.body is None else 415), path


def test_the_document_is_a_page_that_loads_nothing(server: Served) -> None:
    open_server = Served(server.process, server.port, None)
    page = open_server.get("/docs")
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src" not in policy
    text = page.body.decode()
    assert not re.search(r"<script|\bsrc=|\bon[a-z]+=|https?://", text)
    for _, path in {**OPERATIONS, **ADMINISTRATION}:
        assert f"<code>{html.escape(path)}</code>" in text
    targets = set(re.findall(r'href="#([^"]+)"', text))
    assert {"ChatBody", "MessagesBody", "Usage"} <= targets
    assert targets <= set(re.findall(r'id="([^"]+)"', text))
    (row,) = re.findall(r"<tr><th>max_completion_tokens</th>.*?</tr>", text)
    assert "integer or null" in row and "required" not in row
    assert '<tr><th>messages</th><td>list of <a href="#ChatMessage">' in text


def test_what_the_page_shows_of_a_document_is_text() -> None:
    hostile = "<script>alert(1)</script>"
    document = {
        "info": {"title": hostile, "version": "1"},
        "paths": {f"/{hostile}": {"get": {"summary": hostile, "responses": {"200": {}}}}},
        "components": {
            "schemas": {
                hostile: {
                    "type": "object",
                    "description": hostile,
                    "properties": {hostile: {"enum": [hostile], "default": hostile}},
                }
            }
        },
    }
    assert "<script" not in write_document(document)
