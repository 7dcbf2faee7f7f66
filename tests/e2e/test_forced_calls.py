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
