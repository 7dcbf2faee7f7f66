"""Calls that a request demands, by the demo model, which knows nothing of tools."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headstock import LLM, SamplingParams

TEMPLATE = "{{ tools | tojson if tools else '' }}{{ messages[-1].content }}"
TALK = [{"role": "user", "content": "Once upon a time"}]


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


ADD = tool("add", a={"type": "integer", "maximum": 99, "minimum": 0}, b={"type": "boolean"})
SAY = tool("say", text={"type": "string", "maxLength": 8}, mood={"enum": ["glad", "sad"]})


@pytest.mark.feature("W3")
@pytest.mark.full
def test_every_answer_is_a_call_whatever_the_model_would_say() -> None:
    with LLM("demo", num_pages=128, chat_template=TEMPLATE) as llm:
        for choice, tools, names in (
            ("required", [ADD, SAY], {"add", "say"}),
            ({"type": "function", "function": {"name": "say"}}, [ADD, SAY], {"say"}),
            ("required", [ADD], {"add"}),
        ):
            params = SamplingParams(n=6, temperature=1.5, seed=3, max_tokens=300)
            options: Any = {"tools": tools, "tool_choice": choice, "split_answers": True}
            (output,) = llm.chat(TALK, params, **options)
            found = set()
            for answer in output.outputs:
                assert (answer.finish_reason, answer.text) == ("tool_calls", "")
                (call,) = answer.tool_calls
                found.add(call.name)
                arguments = json.loads(call.arguments)
                wanted = {"a": int, "b": bool} if call.name == "add" else {"text": str, "mood": str}
                assert {key: type(value) for key, value in arguments.items()} == wanted
            assert found <= names


@pytest.mark.full
def test_references_of_several_tools_stay_their_own() -> None:
    """Definitions of one name differ; one tool refers to its own root."""
    size = tool("size", of={"$ref": "#/$defs/kind"})
    size["function"]["parameters"]["$defs"] = {"kind": {"enum": ["box", "bag"]}}
    tree = tool(
        "tree", leaf={"$ref": "#/$defs/kind"}, next={"anyOf": [{"$ref": "#"}, {"const": 0}]}
    )
    tree["function"]["parameters"]["$defs"] = {
        "kind": {"type": "integer", "maximum": 9, "minimum": 0}
    }
    settings: dict[str, Any] = {"num_pages": 128, "chat_template": TEMPLATE}
    with LLM("demo", **settings) as llm:
        params = SamplingParams(n=6, temperature=1.0, seed=5, max_tokens=80)
        options: Any = {"tools": [size, tree], "tool_choice": "required", "split_answers": True}
        (output,) = llm.chat(TALK, params, **options)

    ended = [answer for answer in output.outputs if answer.finish_reason == "tool_calls"]
    assert {answer.tool_calls[0].name for answer in ended} == {"size", "tree"}
    for answer in ended:
        (call,) = answer.tool_calls
        arguments = json.loads(call.arguments)
        if call.name == "size":
            assert arguments["of"] in ("box", "bag")
        while call.name == "tree" and arguments:
            assert arguments["leaf"] in range(10)
            arguments = arguments["next"]
