"""The structure of an answer: OpenAI's `response_format`, and vLLM's `structured_outputs`."""

from __future__ import annotations

from typing import Any, Literal, Protocol

from headstock_openai_server.api.bodies import Body
from headstock_openai_server.api.errors import refuse
from headstock_openai_server.api.strict_schemas import check_strict


class JsonSchemaBody(Body, kw_only=True):
    """A schema with a name; it is enforced even without `strict`, which refuses open objects."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(Body, kw_only=True):
    """Text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaBody | None = None


class StructuredOutputsBody(Body, kw_only=True):
    """The structure of an answer; at most one field is set."""

    json: dict[str, Any] | bool | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class StructuredBody(Protocol):
    """A body with fields for the structure of answers, by OpenAI's or vLLM's names."""

    response_format: ResponseFormat | None
    structured_outputs: StructuredOutputsBody | None
    guided_json: dict[str, Any] | bool | str | None
    guided_regex: str | None
    guided_choice: list[str] | None
    guided_grammar: str | None
    guided_json_object: bool | None


GUIDED = {f"guided_{name}": name for name in StructuredOutputsBody.__struct_fields__}
"""vLLM's names before `structured_outputs` -> their names in it."""


def list_guided(body: StructuredBody) -> dict[str, Any]:
    """The structure from vLLM's earlier names, if the body has any."""
    values = {name: getattr(body, name) for name in GUIDED}
    return {name: value for name, value in values.items() if value is not None}


def name_structure(body: StructuredBody) -> str:
    """The field in which this client gave the structure of an answer."""
    if body.structured_outputs is not None:
        return "structured_outputs"
    return next(iter(list_guided(body)), "response_format")


def read_structure(body: StructuredBody) -> dict[str, Any] | None:
    """The structure as `SamplingParams.structured_outputs` takes it; None where any text will do.

    raises: ApiError
    """
    response_format, structured_outputs = body.response_format, body.structured_outputs
    guided = list_guided(body)
    # False requests nothing.
    if guided.get("guided_json_object") is False:
        del guided["guided_json_object"]
    if len(guided) > 1 or (guided and structured_outputs is not None):
        *others, last = [*guided, *(["structured_outputs"] if structured_outputs else [])]
        raise refuse(
            f"{', '.join(others)} and {last} exclude each other; give one of them", others[0]
        )
    if guided:
        ((name, value),) = guided.items()
        structured_outputs = StructuredOutputsBody(**{GUIDED[name]: value})
    if (
        response_format is not None
        and response_format.json_schema is not None
        and response_format.type != "json_schema"
    ):
        raise refuse(
            f"response_format.json_schema is of type json_schema, and the type is "
            f"{response_format.type}; change the type or leave the schema out",
            "response_format.json_schema",
        )
    if response_format is None or response_format.type == "text":
        if structured_outputs is None:
            return None
        names = StructuredOutputsBody.__struct_fields__
        values = {name: getattr(structured_outputs, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}
    if structured_outputs is not None:
        raise refuse(
            f"response_format and {name_structure(body)} exclude each other; give one of them",
            name_structure(body),
        )
    if response_format.type == "json_object":
        return {"json_object": True}
    wanted = response_format.json_schema
    if wanted is None or wanted.schema is None:
        raise refuse(
            "response_format of type json_schema needs json_schema.schema",
            "response_format.json_schema",
        )
    if wanted.strict:
        check_strict(wanted.schema, "response_format.json_schema.schema")
    return {"json": wanted.schema}
