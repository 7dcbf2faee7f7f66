"""The structure of an answer: OpenAI's `response_format`, and vLLM's `structured_outputs`."""

from __future__ import annotations

from typing import Any, Literal

from headstock_openai_server.api.bodies import Body
from headstock_openai_server.api.errors import refuse


class JsonSchemaBody(Body, kw_only=True):
    """A schema with a name; the answer follows it whether or not `strict` asks for that."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(Body, kw_only=True):
    """Text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaBody | None = None


class StructuredOutputsBody(Body, kw_only=True):
    """The structure of an answer, one of them."""

    json: dict[str, Any] | bool | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


def read_structure(
    response_format: ResponseFormat | None, structured_outputs: StructuredOutputsBody | None
) -> dict[str, Any] | None:
    """The structure as `SamplingParams.structured_outputs` takes it; None where any text will do.

    raises: ApiError
    """
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
            "response_format and structured_outputs exclude each other; give one of them",
            "structured_outputs",
        )
    if response_format.type == "json_object":
        return {"json_object": True}
    wanted = response_format.json_schema
    if wanted is None or wanted.schema is None:
        raise refuse(
            "response_format of type json_schema needs json_schema.schema",
            "response_format.json_schema",
        )
    return {"json": wanted.schema}
