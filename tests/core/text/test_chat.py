"""Conversations through chat templates."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from headstock.errors import HeadstockError, ModelError, RequestError, UsageError
from headstock.text.chat import read_template, render_chat
from headstock.text.tokenizer import NoTokenizer, Tokenizer

HELLO = [{"role": "user", "content": "hello"}]


def with_template(byte_level: Path, directory: Path, template: str) -> Tokenizer:
    settings = json.loads((byte_level / "tokenizer_config.json").read_text()) | {
        "chat_template": template
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "tokenizer.json").write_bytes((byte_level / "tokenizer.json").read_bytes())
    return Tokenizer(directory)


def test_the_template_makes_the_prompt(tokenizer: Tokenizer) -> None:
    assert render_chat(tokenizer, HELLO) == "<|im|>user: hello\n<|im|>assistant: "
    assert render_chat(tokenizer, HELLO, add_generation_prompt=False) == "<|im|>user: hello\n"


def test_content_may_be_a_list_of_text_parts(tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    assert render_chat(tokenizer, [{"role": "user", "content": parts}]) == render_chat(
        tokenizer, HELLO
    )


@pytest.mark.parametrize(
    "messages",
    [[], "hello", {}, None, ["hello"], [{"content": "x"}], [{"role": 1, "content": "x"}],
     [{"role": "user", "content": 5}],
     [{"role": "user", "content": [{"type": "image_url"}]}], [{"role": "user", "content": ["x"]}]],
)  # fmt: skip
def test_bad_messages_are_request_errors(tokenizer: Tokenizer, messages: Any) -> None:
    with pytest.raises(RequestError) as caught:
        render_chat(tokenizer, messages)
    assert caught.value.parameter == "messages"


CALL = {"type": "function", "function": {"name": "add", "arguments": "{}"}}


def test_only_a_message_with_calls_may_lack_a_content(
    byte_level: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    for bare in ({"role": "user"}, {"role": "user", "content": None}):
        with pytest.raises(
            RequestError,
            match=r"messages\[1\] \(role user\) has no content; only a message with tool_c",
        ):
            render_chat(tokenizer, [*HELLO, bare])
    talk = [*HELLO, {"role": "assistant", "tool_calls": [CALL]}]
    reads = with_template(
        byte_level,
        tmp_path,
        "{% for m in messages %}{{ m.content or m.tool_calls[0].type }}{% endfor %}",
    )
    assert render_chat(reads, talk) == "hellofunction"
    # templates that add it to a text, or call a method of it
    for template in ("{{ 'x' + messages[1].content }}", "x{{ messages[1].content.strip() }}"):
        (tmp_path / "other").mkdir(exist_ok=True)
        shown = render_chat(with_template(byte_level, tmp_path / "other", template), talk)
        assert shown == "x"
    with pytest.raises(RequestError, match="the chat template refuses these messages: no"):
        render_chat(tokenizer, talk, template="{{ 'x' + raise_exception('no') }}")


@pytest.mark.parametrize(
    ("arguments", "written"),
    [('{"a": 1}', "a=1"), ("", ""), (" ", ""), (None, ""), ({"a": 1}, "a=1")],
)
def test_a_template_reads_arguments_as_an_object(
    tokenizer: Tokenizer, arguments: Any, written: str
) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    talk = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    template = (
        "{% for name, value in messages[-1].tool_calls[0].function.arguments.items() %}"
        "{{ name }}={{ value }}{% endfor %}"
    )
    assert render_chat(tokenizer, talk, template=template) == written


@pytest.mark.parametrize("calls", [[], None])
def test_no_calls_are_as_good_as_none_for_templates_that_look_for_the_key(
    tokenizer: Tokenizer, calls: Any
) -> None:
    template = (
        "{% for m in messages %}{% if 'tool_calls' in m %}"
        "{{ raise_exception('one call, please') if m.tool_calls | length != 1 }}"
        "{% endif %}{{ m.content }};{% endfor %}"
    )
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    turns[1]["tool_calls"] = calls
    assert render_chat(tokenizer, turns, template=template) == "a;b;"


def test_a_model_without_template_says_what_to_do(byte_fallback: Path) -> None:
    with pytest.raises(UsageError, match="no chat template; give it a plain prompt"):
        render_chat(Tokenizer(byte_fallback), HELLO)


@pytest.mark.parametrize(
    ("template", "kind"),
    [
        ("{% if %}", ModelError),
        ("{{ 1 / 0 }}", ModelError),
        ("{{ raise_exception('no system\nplease') }}", RequestError),
        ("{{ messages[0].a.b }}", RequestError),
        ("{{ ().__class__.__bases__ }}", ModelError),
        ("{% for i in range(10000000) %}{% endfor %}", ModelError),
    ],
)
def test_bad_templates_are_one_line(
    byte_level: Path, tmp_path: Path, template: str, kind: type[HeadstockError]
) -> None:
    tokenizer = with_template(byte_level, tmp_path, template)
    with pytest.raises(kind) as caught:
        render_chat(tokenizer, HELLO)
    assert len(str(caught.value).splitlines()) == 1


def test_a_given_template_takes_the_place_of_the_models_and_of_none(
    tokenizer: Tokenizer, byte_fallback: Path
) -> None:
    template = (
        "{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt "
        "%}>{% endif %}"
    )
    for each in (tokenizer, Tokenizer(byte_fallback)):
        assert render_chat(each, HELLO, template=template) == "[hello]>"
        assert render_chat(each, HELLO, template=template, add_generation_prompt=False) == "[hello]"


PARTS = (
    "{% for m in messages %}{{ m.role.upper() }}: {% for part in m.content | selectattr('type', "
    "'equalto', 'text') %}{{ part.text }}{% endfor %};{% endfor %}"
)


@pytest.mark.parametrize("content", ["hello", [{"type": "text", "text": "hello"}]])
def test_a_template_that_reads_parts_alone_gets_parts(tokenizer: Tokenizer, content: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
    text = render_chat(tokenizer, messages, template=PARTS)
    assert text == "SYSTEM: Be brief.;USER: hello;"

    begun = [*messages, {"role": "assistant", "content": "Hi"}]
    text = render_chat(
        tokenizer,
        begun,
        template=PARTS,
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert text.endswith("ASSISTANT: Hi")


def test_a_template_beside_those_of_the_tokenizer_counts_where_these_have_none(
    byte_fallback: Path, byte_level: Path, tmp_path: Path
) -> None:
    for name, directory in (("none", byte_fallback), ("own", byte_level)):
        copy = tmp_path / name
        shutil.copytree(directory, copy)
        (copy / "chat_template.json").write_text(json.dumps({"chat_template": PARTS}))
    assert render_chat(Tokenizer(tmp_path / "none"), HELLO) == "USER: hello;"
    assert render_chat(Tokenizer(tmp_path / "own"), HELLO).startswith("<|im|>user: hello")


@pytest.mark.parametrize("text", ["[", "[]", "{}", '{"chat_template": 3}', "\xff"])
def test_such_a_file_that_holds_no_template_is_named(
    byte_fallback: Path, tmp_path: Path, text: str
) -> None:
    copy = shutil.copytree(byte_fallback, tmp_path / "copy")
    (copy / "chat_template.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=r"chat_template\.json in .* correct or remove the file"):
        render_chat(Tokenizer(copy), HELLO)


def test_a_template_is_text_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages }}\n")
    assert read_template(file) == read_template(str(file)) == "{{ messages }}\n"
    assert read_template("{{ messages[0].content }}") == "{{ messages[0].content }}"
    assert read_template("{% generation %}{% break %}{% endgeneration %}").startswith(
        "{% generation"
    )


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        (
            "chatml",
            ModelError,
            "chat_template chatml: cannot be read: No such file or directory; give a file, or a",
        ),
        (
            "{% if %}",
            UsageError,
            "chat_template: not a Jinja template: Expected an expression, got 'end of statement",
        ),
        ("{{ a\nb", UsageError, "got 'b' (line 2)"),
        ("\n \n", UsageError, "chat_template: the template is empty"),
        (5, RequestError, "chat_template: expected text or a path, got int 5"),
        (Path("/"), ModelError, "chat_template /: cannot be read: Is a directory"),
    ],
)
def test_what_is_no_template_is_named(given: Any, error: type[HeadstockError], said: str) -> None:
    with pytest.raises(error) as raised:
        read_template(given)
    assert said in str(raised.value)


def test_a_given_template_runs_in_the_sandbox_and_its_failures_are_its_own(
    tokenizer: Tokenizer,
) -> None:
    for template, said in (
        ("{{ messages.append(1) }}", "the given chat template uses what the sandbox forbids"),
        ("{{ ''.__class__.__mro__ }}", "the given chat template uses what the sandbox forbids"),
        (
            "{{ ''.__class__.mro() }}",
            "access to attribute '__class__' of 'str' object is unsafe; correct it",
        ),
        ("{{ 1 / 0 }}", "the given chat template failed: division by zero; correct it"),
    ):
        with pytest.raises(ModelError, match=said):
            render_chat(tokenizer, HELLO, template=template)


def test_without_a_tokenizer_no_template_is_blamed() -> None:
    with pytest.raises(ModelError, match=r"^there is no tokenizer$"):
        render_chat(NoTokenizer("there is no tokenizer"), HELLO, template="{{ messages }}")


def test_variables_reach_the_template_and_nothing_else(tokenizer: Tokenizer) -> None:
    template = "{{ messages[0].content }}{% if not thinking %} now{% endif %}"
    assert render_chat(tokenizer, HELLO, template=template) == "hello now"
    variables: dict[str, object] = {"thinking": True, "unread": [1]}
    shown = render_chat(tokenizer, HELLO, template=template, template_kwargs=variables)
    assert shown == "hello"
    for name in ("tokenize", "chat_template", "messages", "conversation", "self", "tools"):
        with pytest.raises(RequestError, match=f"may not set {name}; give it variables") as caught:
            render_chat(tokenizer, HELLO, template_kwargs={name: True})
        assert caught.value.parameter == "chat_template_kwargs"
