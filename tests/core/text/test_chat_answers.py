"""Answers to chats, divided: from Python and on the command line, over a scripted engine."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_templates import HERMES_CALLS

from headstock import LLM, SamplingParams
from headstock.errors import RequestError, UnknownPlugin
from headstock.outputs import CompletionOutput, ToolCall
from headstock.spi import ToolEvent, ToolEventKind, ToolParser
from headstock.text.answer import AnswerDivider, AnswerFormat, join_calls
from headstock.text.completion import join_pieces
from headstock.text.conversation import Conversation
from headstock.text.tokenizer import Tokenizer

from .running import Run

Make = Callable[..., tuple[LLM, Any]]
TALK = [{"role": "user", "content": "2 + 3?"}]
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
]
TEMPLATE = (
    "{{ tools | tojson if tools else '' }}{{ messages[-1].content }}{{ mood }}"
    "{{ reasoning_effort }}{{ documents | tojson if documents else '' }}{# </think> #}"
    + HERMES_CALLS
)
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
ANSWER = f"<think>\nHm.\n</think>\n\nSo: {CALL}\n{CALL}"


def says(tokenizer: Tokenizer, text: str) -> Callable[[Any], list[int]]:
    """A script that says the text and ends."""
    tokens = [*tokenizer.encode(text), 0]
    return lambda _: tokens


def allow(mode: str, *names: str) -> dict[str, Any]:
    """A choice of tools that may be called."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def parts(output: CompletionOutput) -> tuple[Any, ...]:
    calls = [(call.index, call.name, call.arguments) for call in output.tool_calls]
    return output.reasoning, output.text, calls, output.finish_reason


WHOLE = ("Hm.", "So:", [(0, "add", '{"a": 2}'), (1, "add", '{"a": 2}')], "tool_calls")


@pytest.mark.feature("W7")
@pytest.mark.parametrize("pace", [1, 3, 1000])
def test_an_answer_is_divided_alike_whole_streamed_and_whatever_comes_at_once(
    scripted: Make, tokenizer: Tokenizer, pace: int
) -> None:
    llm, _ = scripted(script=says(tokenizer, ANSWER), pace=pace, max_seq_len=900)
    options: Any = {"tools": TOOLS, "chat_template": TEMPLATE, "split_answers": True}
    params = SamplingParams(max_tokens=None)
    (whole,) = llm.chat(TALK, params, **options)
    assert parts(whole.outputs[0]) == WHOLE
    ids = [call.id for call in whole.outputs[0].tool_calls]
    assert len({*ids}) == 2
    assert [call.offset for call in whole.outputs[0].tool_calls] == [len("So:")] * 2

    def check(pieces: list[CompletionOutput]) -> None:
        assert parts(join_pieces(pieces)) == WHOLE
        calls = [call for piece in pieces for call in piece.tool_calls]
        firsts = {call.index: call for call in reversed(calls)}
        assert all(call.id and call.name == "add" for call in firsts.values())
        assert all((call in firsts.values()) == bool(call.id) for call in calls)

    check([piece.outputs[0] for piece in llm.stream_chat(TALK, params, **options)])

    async def read() -> list[CompletionOutput]:
        stream = llm.astream_chat(TALK, params, **options)
        return [piece.outputs[0] async for piece in stream]

    check(asyncio.run(read()))
    # Without being asked for, the text is what the model wrote.
    (plain,) = llm.chat(TALK, params, tools=TOOLS, chat_template=TEMPLATE)
    assert parts(plain.outputs[0]) == (None, ANSWER, [], "stop")


@pytest.mark.feature("W3", "W4")
@pytest.mark.parametrize("pace", [1, 1000])
def test_a_call_in_reasoning_that_never_closes_ends_an_answer_with_tool_calls(
    scripted: Make, tokenizer: Tokenizer, pace: int
) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
    llm, _ = scripted(script=says(tokenizer, f"Hm.\n{call}"), pace=pace, max_seq_len=900)
    options: Any = {"tools": TOOLS, "chat_template": TEMPLATE + "<think>", "split_answers": True}
    params = SamplingParams(max_tokens=None)
    expected = ("Hm.", "", [(0, "add", '{"a": 2}')], "tool_calls")
    (output,) = llm.chat(TALK, params, **options)
    assert parts(output.outputs[0]) == expected
    stream = llm.stream_chat(TALK, params, **options)
    assert parts(join_pieces([piece.outputs[0] for piece in stream])) == expected
    # Of a tool that the request does not offer, it is reasoning.
    llm, _ = scripted(script=says(tokenizer, call.replace("add", "sub")), max_seq_len=900)
    (output,) = llm.chat(TALK, params, **options)
    assert parts(output.outputs[0]) == (call.replace("add", "sub"), "", [], "stop")


def test_one_call_ends_an_answer_that_may_have_one(scripted: Make, tokenizer: Tokenizer) -> None:
    llm, loop = scripted(script=says(tokenizer, ANSWER + " and so on" * 50), max_seq_len=1900)
    params = SamplingParams(max_tokens=None)
    options: Any = {"tools": TOOLS, "chat_template": TEMPLATE, "split_answers": True}
    options |= {"parallel_tool_calls": False}
    (output,) = llm.chat(TALK, params, **options)
    assert parts(output.outputs[0]) == (*WHOLE[:2], WHOLE[2][:1], "tool_calls")
    assert loop.aborted == ["0"], "the engine would have gone on"

    async def read_slowly() -> list[int]:
        tokens: list[int] = []
        async for piece in llm.astream_chat(TALK, params, **options):
            while not tokens and loop.rows:
                time.sleep(0.001)  # the event loop is held up until the engine has said all
            tokens += piece.outputs[0].token_ids
        return tokens

    # Tokens behind the call came before anyone saw its end.
    assert asyncio.run(read_slowly()) == output.outputs[0].token_ids


def test_marks_that_are_special_tokens_are_seen_by_the_parser_alone(tokenizer: Tokenizer) -> None:
    from headstock.text.detokenizer import Detokenizer

    shown = Detokenizer(tokenizer, shown_ids=tokenizer.find_ids(["<|im|>", "no token"]))
    assert shown.add_tokens([1, *tokenizer.encode("a"), 0]) == "<|im|>a"
    assert Detokenizer(tokenizer).add_tokens([1, *tokenizer.encode("a"), 0]) == "a"


@pytest.mark.feature("W7")
def test_a_conversation_is_the_same_on_the_command_line(
    run: Run, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    file, tools = tmp_path / "chats.jsonl", tmp_path / "tools.json"
    tools.write_text(json.dumps(TOOLS))
    body = {
        "messages": TALK,
        "tools": TOOLS,
        "chat_template": TEMPLATE,
        "chat_template_kwargs": {"mood": "!"},
        "reasoning_effort": "low",
        "documents": [{"title": "Sums", "text": "5"}],
    }
    file.write_text(json.dumps(body) + "\n" + json.dumps({"messages": TALK}))

    said: Any = {"script": says(tokenizer, ANSWER), "max_seq_len": 900}
    _, out, _ = run("--input", str(file), "--json", "--max-tokens", "500", **said)
    first, second = map(json.loads, out.splitlines())
    assert first["prompt"] == json.dumps(TOOLS) + "2 + 3?!low" + json.dumps(body["documents"])
    assert (first["reasoning"], first["text"], first["finish_reason"]) == (*WHOLE[:2], WHOLE[3])
    assert [(call["name"], call["arguments"]) for call in first["tool_calls"]] == [
        ("add", '{"a": 2}')
    ] * 2
    assert second["text"] == ANSWER and "tool_calls" not in second
    assert second["prompt"] == "<|im|>user: 2 + 3?\n<|im|>assistant: "
    _, out, _ = run(
        *("-p", "2 + 3?", "--tools", str(tools), "--chat-template", TEMPLATE, "--json"),
        *("--chat-template-kwargs", '{"mood": "?"}'),
    )
    assert json.loads(out)["prompt"] == json.dumps(TOOLS) + "2 + 3??"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--tools", "/absent"), "--tools /absent: cannot be read: No such file"),
        (("--tools", "{folder}/bad"), "--tools: not valid JSON"),
        (("--chat-template-kwargs", "{"), "--chat-template-kwargs: not valid JSON"),
        (("--chat-template-kwargs", "[]"), "chat_template_kwargs: expected an object, got list"),
    ],
)
def test_flags_of_conversations_are_checked_before_a_model_is_loaded(
    run: Run, tmp_path: Path, flags: tuple[str, ...], said: str
) -> None:
    (tmp_path / "bad").write_text("[")
    given = [flag.replace("{folder}", str(tmp_path)) for flag in flags]
    code, out, err = run("-p", "a", *given, absent=True)
    assert code in (2, 6) and not out
    assert said in " ".join(err.split())


@pytest.mark.parametrize(
    ("options", "parameter", "said"),
    [
        ({"tols": []}, "tols", "no option of a chat is called tols; did you mean tools?"),
        ({"tools": 5}, "tools", "tools: expected a list of tools, got int 5"),
        ({"tools": [5]}, "tools", r"tools\[0\]: expected an object"),
        ({"tools": [{"type": "web"}]}, "tools", r"tools\[0\].type: expected function, got web"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools",
            r"tools\[0\].function.name: expected 1 to 128 letters",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "code": ""}}]},
            "tools",
            r"tools\[0\].function.code is not a known field",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
            "tools",
            "function.parameters: expected a JSON schema, got list",
        ),
        ({"tools": TOOLS * 2}, "tools", "two tools are called add; names must differ"),
        ({"tools": TOOLS}, "tools", "the chat template does not write tools; leave tools out"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "expected none, auto, required or"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "tool_choice names x, which is not among tools",
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "custom", "custom": {"name": "add"}}},
            "tool_choice",
            "tool_choice: expected none, .*, got type custom",
        ),
        (
            {"tools": TOOLS, "tool_choice": allow("auto", "x")},
            "tool_choice",
            "tool_choice allows x, which is not among tools",
        ),
        (
            {"tools": TOOLS, "tool_choice": allow("any", "add")},
            "tool_choice",
            r'allowed_tools: expected {"mode": "auto" or "required", "tools": \[',
        ),
        ({"tools": TOOLS, "tool_choice": allow("auto")}, "tool_choice", "allowed_tools: expected"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls", "expected true or false, got int 1"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "the chat template does not read it"),
        ({"documents": [{}]}, "documents", "the chat template does not write documents"),
        ({"documents": ["a"]}, "documents", r"documents\[0\]: expected an object, got str"),
        ({"continue_final_message": True}, "continue_final_message", "add_generation_prompt false"),
    ],
)
def test_what_a_chat_cannot_do_is_refused_by_name(
    scripted: Make, options: dict[str, Any], parameter: str, said: str
) -> None:
    llm, _ = scripted()
    with pytest.raises(RequestError, match=said) as caught:
        llm.chat(TALK, **options)
    assert caught.value.parameter == parameter
    with pytest.raises(RequestError, match=said):
        llm.stream_chat(TALK, **options)


SUB: Any = {"type": "function", "function": {"name": "sub"}}
SCHEMA = {"type": "object"}


@pytest.mark.parametrize(
    ("choice", "tools", "schema", "text", "call"),
    [
        ("required", TOOLS, SCHEMA, '{"a":1}', ("add", '{"a":1}')),
        (
            {"type": "function", "function": {"name": "sub"}},
            [*TOOLS, SUB],
            SCHEMA,
            '{"a":{}}',
            ("sub", '{"a":{}}'),
        ),
        (
            "required",
            [*TOOLS, SUB],
            "anyOf",
            '{"name":"sub","parameters":{"a":{}}}',
            ("sub", '{"a":{}}'),
        ),
    ],
)
@pytest.mark.parametrize("pace", [1, 1000])
def test_a_forced_call_is_a_structure_of_the_answer(
    scripted: Make,
    tokenizer: Tokenizer,
    choice: Any,
    tools: list[Any],
    schema: Any,
    text: str,
    call: tuple[str, str],
    pace: int,
) -> None:
    llm, loop = scripted(script=says(tokenizer, text), pace=pace, max_seq_len=900)
    # The template has opened reasoning, and the structure leaves no room for it.
    options: Any = {"tools": tools, "chat_template": TEMPLATE + "<think>", "split_answers": True}
    asked = SamplingParams(max_tokens=200)
    (output,) = llm.chat(TALK, asked, tool_choice=choice, **options)
    assert parts(output.outputs[0]) == (None, "", [(0, *call)], "tool_calls")
    structure = loop.seen[0].params.structured_outputs
    assert json.loads(structure.json) == schema or schema in json.loads(structure.json)
    # Cut off, the arguments are what was written, and there is no end.
    (output,) = llm.chat(TALK, SamplingParams(max_tokens=len(tokenizer.encode(text)) - 1),
                         tool_choice=choice, **options)  # fmt: skip
    (cut,) = output.outputs
    assert cut.finish_reason == "length" and call[1].startswith(cut.tool_calls[0].arguments)


def test_allowed_tools_are_those_that_are_offered_or_one_of_which_is_called() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in "abc"]
    for mode, forced in (("auto", []), ("required", ["a", "c"])):
        asked = Conversation(messages=TALK, tools=tools, tool_choice=allow(mode, "c", "a"))
        assert list(asked.offered_tools) == [tools[0], tools[2]]
        assert [tool.name for tool in asked.forced_tools] == forced


def test_a_forced_call_is_no_other_structure_than_json_of_the_text(scripted: Make) -> None:
    llm, loop = scripted()
    # Clients name the schema of the last answer in every turn; a call has no text.
    both = SamplingParams(max_tokens=1, structured_outputs={"json": {"type": "array"}})  # type: ignore[arg-type]
    llm.chat(TALK, both, tools=TOOLS, tool_choice="required", chat_template=TEMPLATE)
    assert loop.seen[0].params.structured_outputs.json == '{"type": "object"}'
    params = SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="tool_choice requires a call, and the request asks"):
        llm.chat(TALK, params, tools=TOOLS, tool_choice="required", chat_template=TEMPLATE)
    with pytest.raises(RequestError, match="tool_choice needs tools to choose from"):
        llm.chat(TALK, tool_choice="required")


def test_the_last_message_may_be_gone_on_with(scripted: Make) -> None:
    llm, _ = scripted()
    talk = [*TALK, {"role": "assistant", "content": "It is"}]
    options: Any = {"add_generation_prompt": False, "continue_final_message": True}
    (output,) = llm.chat(talk, SamplingParams(max_tokens=1), **options)
    assert output.prompt == "<|im|>user: 2 + 3?\n<|im|>assistant: It is"
    # Calls come behind the text, and would be lost.
    talk[-1] |= {"tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
    with pytest.raises(RequestError, match="this one ends with tool_calls; leave them out"):
        llm.chat(talk, **options)


def test_a_parser_that_is_not_installed_is_refused_before_a_model_is_loaded() -> None:
    with pytest.raises(UnknownPlugin, match="no tool parser 'herms' is installed"):
        LLM(tool_parser="herms", start=lambda _: pytest.fail("it was started"))


class Broken(ToolParser):
    """A parser that says what it is told to: events, a call of a function, or nothing at all."""

    def __init__(self, events: Any) -> None:
        self.events = events

    def feed(self, text: str) -> Any:
        return self.events("mine") if callable(self.events) else self.events or []

    def finish(self) -> list[Any]:
        if self.events is None:
            return []
        raise KeyError("mine")


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([ToolEvent(ToolEventKind.END)], "ValueError: a END event outside a call"),
        ([ToolEvent(ToolEventKind.ARGUMENTS, "{")], "a ARGUMENTS event outside a call"),
        (["text"], "AttributeError"),
        ([ToolEvent("content", "x")], "ValueError: a content event"),  # type: ignore[arg-type]
        ([], "KeyError: 'mine'"),
        (sys.exit, "SystemExit: mine"),
        (None, "ValueError: an answer of "),
    ],
)
def test_a_broken_parser_fails_the_answer_and_is_named(
    scripted: Make, monkeypatch: pytest.MonkeyPatch, events: Any, said: str
) -> None:
    from headstock.requests import answer_formats

    llm, _ = scripted()
    formats = llm._session.input_processor.answer_formats
    made = AnswerFormat(make_parser=lambda: Broken(events), parser_label="tool parser 'x' (y)")
    monkeypatch.setattr(formats, "make_format", lambda *_: made)
    assert isinstance(formats, answer_formats.AnswerFormats)
    (output,) = llm.chat(TALK, SamplingParams(max_tokens=3), split_answers=True)
    (answer,) = output.outputs
    assert answer.finish_reason == "error" and answer.error is not None
    assert answer.error.startswith("tool parser 'x' (y) failed: ") and said in answer.error


def test_pieces_of_calls_are_joined_by_their_index() -> None:
    def pieces() -> Iterator[ToolCall]:
        yield ToolCall(0, "a", "f")
        yield ToolCall(0, arguments='{"x"')
        yield ToolCall(1, "b", "g", "{}")
        yield ToolCall(0, arguments=": 1}")

    assert join_calls([*pieces()]) == (
        ToolCall(0, "a", "f", '{"x": 1}'),
        ToolCall(1, "b", "g", "{}"),
    )
    assert AnswerDivider(AnswerFormat()).add_text("x", is_last=True).content == "x"
