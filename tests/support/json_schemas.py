"""Random JSON schemas of the kinds that people write, whose answers are bounded."""

from __future__ import annotations

import random
from typing import Any

WORDS = (
    *("name", "age", "city", "email", "tags", "items", "price", "status", "id", "active", "notes"),
    *("first name", "größe", "created_at", "$type", "score"),
)


def draw_schema(seed: int) -> dict[str, Any]:
    """An object of a few properties."""
    rng = random.Random(seed)
    schema = draw_object(rng, 2)
    if rng.random() < 0.25:
        name = next(iter(schema["properties"]))
        schema["$defs"] = {"Part": draw_object(rng, 1)}
        schema["properties"][name] = {"$ref": "#/$defs/Part"}
        schema["required"] = sorted({*schema.get("required", ()), name})
    return schema


def draw_object(rng: random.Random, depth: int) -> dict[str, Any]:
    """An object, closed as OpenAI's strict mode wants it, or open for no other property."""
    names = rng.sample(WORDS, rng.randint(1, 5))
    required = names if rng.random() < 0.6 else rng.sample(names, rng.randint(0, len(names)))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: draw_value(rng, depth) for name in names},
        "additionalProperties": False,
    }
    if rng.random() < 0.5:
        schema["description"] = "What is asked for."
    return schema | ({"required": required} if required else {})


def draw_value(rng: random.Random, depth: int) -> dict[str, Any]:
    """A value of any kind."""
    kinds = ["string", "enum", "integer", "number", "boolean", "null", "const", "pattern", "format"]
    if depth:
        kinds += ["object", "array", "array", "anyOf", "nullable", "tuple"]
    match rng.choice(kinds):
        case "string":
            least = rng.randint(0, 3)
            return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 12)}
        case "enum":
            return {"enum": rng.sample(["red", "green", "blue", "a b", "ö", "", 3, None], 3)}
        case "integer":
            least = rng.randint(-300, 300)
            return {"type": "integer", "minimum": least, "maximum": least + rng.randint(0, 5000)}
        case "number":
            return {"type": "number", "minimum": 0, "maximum": 100, "multipleOf": 0.25}
        case "boolean":
            return {"type": "boolean"}
        case "null":
            return {"type": "null"}
        case "const":
            return {"const": rng.choice(["fixed", 7, True, None])}
        case "pattern":
            return {"type": "string", "pattern": r"^[A-Z]{2}\d{3}$"}
        case "format":
            # Not `date-time`: its seconds may have any number of digits.
            return {"type": "string", "format": rng.choice(["date", "uuid", "ipv4"])}
        case "object":
            return draw_object(rng, depth - 1)
        case "array":
            least = rng.randint(0, 2)
            most = least + rng.randint(0, 2)
            items = draw_value(rng, depth - 1)
            return {"type": "array", "items": items, "minItems": least, "maxItems": most}
        case "anyOf":
            return {"anyOf": [draw_value(rng, 0), draw_value(rng, depth - 1)]}
        case "nullable":
            return {"type": ["string", "null"], "maxLength": 9}
    parts = [draw_value(rng, 0) for _ in range(rng.randint(1, 3))]
    return {
        "type": "array",
        "prefixItems": parts,
        "items": False,
        "minItems": len(parts),
        "maxItems": len(parts),
    }
