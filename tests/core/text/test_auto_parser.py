"""Which tool parser `--tool-parser auto` takes: the one that reads what the template writes."""

from __future__ import annotations

from typing import Any

import pytest
from chat_templates import HERMES_CALLS

from headstock.errors import PluginBroken, RequestError
from headstock.requests import answer_formats
from headstock.requests.answer_formats import AnswerFormats
from headstock.selection.tool_parsers import SelectedToolParser
from headstock.spi import Tool, ToolEvent, ToolParser
from headstock.text.conversation import Conversation
from headstock.text.tokenizer import Tokenizer

from .test_chat_answers import TALK, TOOLS, Make

OFFER = Conversation(messages=TALK, tools=TOOLS)


def write(calls: str, before: str = "", after: str = "") -> str:
    """A template that writes each call so, between what begins and ends an answer."""
    return (
        "{{ tools | tojson }}{% for m in messages %}<|{{ m.role }}|>"
        + f"{before}{{{{ m.content or '' }}}}"
        + "{% for c in m.tool_calls or [] %}"
        + calls.replace("NAME", "{{ c.function.name }}")
        .replace("ARGUMENTS", "{{ c.function.arguments | tojson }}")
        .replace("OBJECT", "{{ c.function | tojson }}")
        + f"{{% endfor %}}{after}<|end|>{{% endfor %}}"
    )


def write_each(one: str) -> str:
    """The arguments, each written so."""
    each = one.replace("KEY", "{{ k }}").replace("VALUE", "{{ v }}")
    return f"{{% for k, v in c.function.arguments.items() %}}{each}{{% endfor %}}"


PARAMETERS = write_each("<parameter=KEY>\nVALUE\n</parameter>\n")
GLM = write_each("<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n")
INVOKE = write_each('<parameter name="KEY">VALUE</parameter>\n')
SCHEMA = "{% if tools %}Call so: <tool_call>{{ '{\"name\": ...}' }}</tool_call>{% endif %}"

FORMATS = {
    "hermes": write("\n<tool_call>\nOBJECT\n</tool_call>"),
    "hermes without line breaks": write("<tool_call>OBJECT</tool_call>"),
    "hermes behind reasoning": write(
        "<tool_call>\nOBJECT\n</tool_call>", before="<think>\n\n</think>\n\n"
    ),
    "qwen3_coder": write(f"<tool_call>\n<function=NAME>\n{PARAMETERS}</function>\n</tool_call>"),
    "qwen3_coder without the outer tag": write(f"<function=NAME>\n{PARAMETERS}</function>"),
    "mistral": write("[TOOL_CALLS][OBJECT]", after="</s>"),
    "mistral v11": write("[TOOL_CALLS]NAME[ARGS]ARGUMENTS", after="</s>"),
    "mistral with ids": write("[TOOL_CALLS]NAME[CALL_ID]{{ c.id }}[ARGS]ARGUMENTS"),
    "llama3_json": write('{"name": "NAME", "parameters": ARGUMENTS}'),
}
UNKNOWN = {
    "no calls": write(""),
    "the mark alone, in a comment": write("") + "{# <tool_call> [TOOL_CALLS] <function= #}",
    "the format in its instructions alone": SCHEMA + write(""),
    "other tags around JSON": write("<tool_calls>[OBJECT]</tool_calls>"),
    "Nemotron": write("<TOOLCALL>[OBJECT]</TOOLCALL>"),
    "GLM": write(f"<tool_call>NAME\n{GLM}</tool_call>"),
    "Seed": write(f"<seed:tool_call>\n<function=NAME>\n{PARAMETERS}</function>\n</seed:tool_call>"),
    "MiniMax": write(f'<x:tool_call>\n<invoke name="NAME">\n{INVOKE}</invoke>\n</x:tool_call>'),
    "marks between the tags": write(f"]<]x[>[<tool_call>\n]<]x[>[<invoke>{INVOKE}"),
    "functionary v3.2": write(">>>NAME\nARGUMENTS"),
    "Kimi": write("<|call|>functions.NAME:0<|argument|>ARGUMENTS<|call_end|>"),
    "a turn of its own": write("<|message|>function call<|role|>OBJECT"),
    "arguments without their types": write(
        "<tool_call>{{ {'name': c.function.name, 'arguments': {}} | tojson }}</tool_call>"
    ),
    "another name": write('{"name": "functions.NAME", "parameters": ARGUMENTS}'),
    "a refusal of answers": write("{{ raise_exception('no calls') }}"),
}


def choose(tokenizer: Tokenizer, template: str, **settings: str) -> str:
    made = AnswerFormats(**settings).make_format(OFFER, template, "", tokenizer)
    assert made is not None
    return made.parser_label


@pytest.mark.feature("W3")
@pytest.mark.parametrize("name", FORMATS)
def test_a_template_gets_the_parser_that_reads_its_calls(tokenizer: Tokenizer, name: str) -> None:
    parser = name.split()[0]
    assert f"{parser!r} (headstock-tool-parsers" in choose(tokenizer, FORMATS[name])


@pytest.mark.feature("W3")
@pytest.mark.parametrize("name", UNKNOWN)
def test_a_template_of_another_format_gets_none(tokenizer: Tokenizer, name: str) -> None:
    with pytest.raises(
        RequestError, match=r"no known format; choose with tool_parser \(--tool-parser\)"
    ) as caught:
        choose(tokenizer, UNKNOWN[name])
    assert caught.value.parameter == "tools"
    # The user knows better.
    assert "'hermes'" in choose(tokenizer, UNKNOWN[name], tool_parser="hermes")


def test_a_setting_counts_whatever_the_template_writes(tokenizer: Tokenizer) -> None:
    hermes = FORMATS["hermes"]
    assert "'mistral'" in choose(tokenizer, hermes, tool_parser="mistral")
    with pytest.raises(RequestError, match=r"tool_parser \(--tool-parser\) is off"):
        choose(tokenizer, hermes, tool_parser="off")
    with pytest.raises(RequestError, match="no tool parser 'other' is installed"):
        choose(tokenizer, hermes, tool_parser="other")
    plain = Conversation(messages=TALK)
    assert AnswerFormats().make_format(plain, hermes, "", tokenizer) is None


def test_a_chat_without_a_known_format_is_refused_only_with_tools(scripted: Make) -> None:
    llm, _ = scripted()
    options: Any = {"chat_template": write("", after="!"), "split_answers": True}
    with pytest.raises(RequestError, match="no known format") as caught:
        llm.chat(TALK, tools=TOOLS, **options)
    assert caught.value.parameter == "tools"
    (output,) = llm.chat(TALK, **options)
    assert output.outputs[0].finish_reason is not None


def test_templates_are_tried_once_and_remembered_in_number(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_formats, "MAX_TEMPLATES", 2)
    formats = AnswerFormats()
    for count in (1, 2, 3, 3):
        template = "tools" * count + "{{ messages[-1].content or '' }}" + HERMES_CALLS
        formats.make_format(OFFER, template, "", tokenizer)
    assert [key.count("tools") for key in formats.by_template] == [2, 3]


class Raising(ToolParser):
    """A parser that fails."""

    def __init__(self, tools: tuple[Tool, ...]) -> None:
        pass

    def feed(self, text: str) -> list[ToolEvent]:
        raise KeyError("mine")

    def finish(self) -> list[ToolEvent]:
        return []


def test_a_parser_that_fails_on_the_sample_is_named(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SelectedToolParser, "make", lambda self, tools: Raising(tools))
    with pytest.raises(RequestError, match=r"'hermes' .* failed: KeyError: 'mine'") as caught:
        choose(tokenizer, FORMATS["hermes"])
    assert isinstance(caught.value.__cause__, PluginBroken)
