"""Answers cut and bent at random: what every tool parser owes whatever a model writes."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence

import pytest
from attrs import evolve, frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from often import count_examples

from headstock import registry
from headstock.spi import Tool, ToolEvent, ToolEventKind, ToolParser
from headstock.text.forced_call import ForcedCallParser

NAMES = [
    plugin.name
    for plugin in registry.list_installed("tools")
    if plugin.distribution == "headstock-tool-parsers"
]
PROPERTIES = {**{key: {"type": "string"} for key in "abcd"}, "n": {"type": "integer"}}
TOOLS = (
    Tool(name="f", parameters={"type": "object", "properties": PROPERTIES}),
    Tool(name="g", parameters={}),
)
MAKERS: dict[str, Callable[[Sequence[Tool]], ToolParser]] = {
    name: registry.import_implementation(registry.load_spec("tools", name)) for name in NAMES
}
WORD = re.compile(r"q[0-9]+z")


@frozen
class Call:
    """A call that was found, its arguments as text."""

    name: str
    arguments: str = ""
    has_end: bool = False


@frozen
class Found:
    """What was found in an answer, or in the beginning of one."""

    content: str = ""
    calls: tuple[Call, ...] = ()

    @property
    def num_ended(self) -> int:
        return sum(call.has_end for call in self.calls)

    @property
    def words(self) -> list[str]:
        """The marked words of all text that was given out."""
        texts = [self.content, *(f"{call.name} {call.arguments}" for call in self.calls)]
        return sorted(word for text in texts for word in WORD.findall(text))

    def add(self, events: Sequence[ToolEvent]) -> Found:
        """What was found with these events too."""
        content, calls = self.content, list(self.calls)
        for event in events:
            match event.kind:
                case ToolEventKind.CONTENT:
                    content += event.text
                case ToolEventKind.CALL:
                    calls.append(Call(event.text))
                case ToolEventKind.ARGUMENTS:
                    calls[-1] = evolve(calls[-1], arguments=calls[-1].arguments + event.text)
                case ToolEventKind.END:
                    calls[-1] = evolve(calls[-1], has_end=True)
        return Found(content, tuple(calls))


def read_steps(
    make: Callable[[Sequence[Tool]], ToolParser], pieces: Sequence[str]
) -> Iterator[Found]:
    """What is found after each piece, and last at the end of the answer."""
    parser, found = make(TOOLS), Found()
    for piece in pieces:
        yield (found := found.add(parser.feed(piece)))
    yield found.add(parser.finish())


def read(name: str, pieces: Sequence[str]) -> Found:
    return list(read_steps(MAKERS[name], pieces))[-1]


# what models write: lists of parts, between which anything may come


def write_json(value: dict[str, object]) -> list[str]:
    return re.findall(r'"(?:[^"\\]|\\.)*"|[^\s"]|\s+', json.dumps(value, ensure_ascii=False))


def write_object(key: str, arguments: dict[str, object]) -> list[str]:
    return ["{", '"name"', ":", '"f"', ",", f'"{key}"', ":", *write_json(arguments), "}"]


def write_hermes(calls: list[dict[str, object]]) -> list[str]:
    parts = []
    for arguments in calls:
        parts += ["<tool_call>", "\n", *write_object("arguments", arguments), "\n", "</tool_call>"]
    return parts


def write_llama(calls: list[dict[str, object]]) -> list[str]:
    parts = []
    for arguments in calls:
        parts += [*write_object("parameters", arguments), "; "]
    return ["<|python_tag|>", *parts[:-1]]


def write_mistral(calls: list[dict[str, object]]) -> list[str]:
    if len(calls) % 2:
        return [
            part
            for arguments in calls
            for part in ("[TOOL_CALLS]", "f", "[ARGS]", *write_json(arguments))
        ]
    parts = []
    for arguments in calls:
        parts += [*write_object("arguments", arguments), ", "]
    return ["[TOOL_CALLS]", "[", *parts[:-1], "]"]


def write_coder(calls: list[dict[str, object]]) -> list[str]:
    parts = []
    for arguments in calls:
        parts += ["<tool_call>", "\n", "<function=f>", "\n"]
        for key, value in arguments.items():
            parts += [f"<parameter={key}>", "\n", str(value), "\n", "</parameter>", "\n"]
        parts += ["</function>", "\n", "</tool_call>"]
    return parts


WRITERS = {
    "hermes": write_hermes,
    "llama3_json": write_llama,
    "mistral": write_mistral,
    "qwen3_coder": write_coder,
}
TEXTS = st.sampled_from(
    ["{}", "{} <tool_call> {}", "</tool_call>{}", "a\n{}\n", '"{}\\', "[{}] }}", "é天🌧{}", "{}<b>"]
)


@st.composite
def answers(draw: st.DrawFn, name: str) -> tuple[list[str], list[dict[str, object]]]:
    """The parts of an answer, and the arguments of its calls. All words differ."""
    count = iter(range(1000))

    def mark(text: str) -> str:
        while "{}" in text:
            text = text.replace("{}", f"q{next(count)}z", 1)
        return text

    calls: list[dict[str, object]] = []
    for _ in range(draw(st.integers(1, 3))):
        keys = draw(st.permutations("abcd"))[: draw(st.integers(0, 4))]
        calls.append({key: mark(draw(TEXTS)).replace("}}", "}") for key in keys})
        if draw(st.booleans()):
            calls[-1]["n"] = draw(st.integers(-10, 10))
    parts = WRITERS[name](calls)
    if draw(st.booleans()):
        parts = [mark("I see {}."), "\n", *parts]
    if draw(st.booleans()):
        parts = [*parts, "\n", mark("And {}.")]
    return parts, calls


def bend(parts: Sequence[str], chance: random.Random) -> str:
    """An answer with parts left out, written twice, exchanged, put in, and cut."""
    bent = list(parts)
    for number in range(chance.randint(0, 4)):
        place, other = chance.randrange(len(bent)), chance.randrange(len(bent))
        match chance.randrange(5):
            case 0 if len(bent) > 1:
                del bent[place]
            case 1:
                bent.insert(other, bent[place])
            case 2:
                bent[place], bent[other] = bent[other], bent[place]
            case 3:
                bent.insert(place, f" q{1000 + number}z ")
            case 4:
                bent.insert(place, chance.choice(["{", "}", "[", "]", ",", '"', "\\", "<", "\n"]))
    text = "".join(bent)
    return text[: chance.randint(0, len(text))] if chance.random() < 0.3 else text


def cut(text: str, chance: random.Random) -> list[str]:
    borders = sorted(chance.choices(range(len(text) + 1), k=chance.randint(0, 12)))
    return [text[a:b] for a, b in zip([0, *borders], [*borders, len(text)], strict=True)]


def is_json_start(text: str) -> bool:
    """Whether JSON can begin so."""
    closers = []
    for char in re.sub(r'"(?:[^"\\]|\\.)*("|$)', "", text):
        if char in "{[":
            closers.append("}" if char == "{" else "]")
        elif char in "}]":
            closers.pop()
    tails = ["", '"', '":0', ":0", "0", "rue", "ue", "e", "alse", "lse", "se", "ull", "ll", "l"]
    for tail in tails:
        try:
            json.loads(text + tail + "".join(reversed(closers)))
        except ValueError:
            continue
        return True
    return False


def is_part_in_order(content: str, text: str) -> bool:
    """Whether the characters of the content stand in the text, in this order."""
    rest = iter(text)
    return all(char in rest for char in content)


@pytest.mark.feature("W3")
@pytest.mark.parametrize("name", NAMES)
@given(data=st.data(), chance=st.randoms(use_true_random=False))
@settings(max_examples=count_examples(200))
def test_bent_answers_keep_every_law(name: str, data: st.DataObject, chance: random.Random) -> None:
    parts, _ = data.draw(answers(name))
    text = bend(parts, chance)
    whole = read(name, [text])
    # However an answer is cut, the same is found.
    assert read(name, cut(text, chance)) == whole == read(name, list(text))
    for call in whole.calls:
        assert is_json_start(call.arguments or "{")
        if call.has_end:
            assert isinstance(json.loads(call.arguments), dict)
    assert is_part_in_order(whole.content, text)
    if not whole.calls:
        assert whole.content == text
    # No word is lost, nor given twice.
    written = {word: text.rindex(word) for word in WORD.findall(text)}
    missing = [word for word in written if word not in whole.words]
    if name != "qwen3_coder":
        # What stands behind the arguments within the object of a call is no text.
        assert not [word for word in missing if int(word[1:-1]) >= 1000]
    elif missing:
        # The last argument is cut, and is given as a whole or not at all.
        assert not whole.calls[-1].has_end
        arguments = WORD.findall(whole.calls[-1].arguments)
        assert min(written[each] for each in missing) > max(map(written.get, arguments), default=-1)
    assert all(whole.words.count(word) <= text.count(word) for word in whole.words)


@pytest.mark.feature("W3")
@pytest.mark.parametrize("name", NAMES)
@given(data=st.data(), chance=st.randoms(use_true_random=False))
@settings(max_examples=count_examples(75))
def test_whole_calls_are_found_and_none_ends_in_an_answer_that_is_cut_before_its_end(
    name: str, data: st.DataObject, chance: random.Random
) -> None:
    parts, calls = data.draw(answers(name))
    text = "".join(parts)
    whole = read(name, cut(text, chance))
    assert [(call.name, json.loads(call.arguments)) for call in whole.calls] == [
        ("f", arguments) for arguments in calls
    ]
    assert all(call.has_end for call in whole.calls)
    assert whole.words == sorted(WORD.findall(text))
    for length in range(len(text)):
        if name == "qwen3_coder" and text[:length].endswith("\n</tool_call>"):
            continue  # the tag, which is part of a value here, could be the end of the call
        found = read(name, [text[:length]])
        assert found.calls == whole.calls[: len(found.calls)] or (
            found.calls[:-1] == whole.calls[: len(found.calls) - 1]
            and not found.calls[-1].has_end
            and whole.calls[len(found.calls) - 1].arguments.startswith(found.calls[-1].arguments)
        )


@pytest.mark.feature("W3")
@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=count_examples(100))
def test_at_most_the_value_of_one_argument_is_held_back(name: str, data: st.DataObject) -> None:
    parts, calls = data.draw(answers(name))
    text = "".join(parts)
    values = [value for arguments in calls for value in arguments.values()]
    words = [WORD.findall(str(value)) for value in values]
    for length, found in enumerate(read_steps(MAKERS[name], text), start=1):
        # A value is whole when the next one begins; all before it has gone out by then.
        begun = [index for index, each in enumerate(words) if each and each[0] in text[:length]]
        due = [word for each in words[: max(begun, default=0)] for word in each]
        assert set(due) <= set(found.words)
    prose = " ".join(f"q{number}z, and so on" for number in range(100)) + ".\n\n"
    for length, found in enumerate(read_steps(MAKERS[name], prose[:-2]), start=1):
        assert found.content in (prose[:length], prose[: length - 1])


@pytest.mark.parametrize("tools", [TOOLS, TOOLS[:1]], ids=["several", "one"])
@given(data=st.data(), chance=st.randoms(use_true_random=False))
@settings(max_examples=count_examples(100))
def test_a_forced_call_keeps_the_laws(
    tools: Sequence[Tool], data: st.DataObject, chance: random.Random
) -> None:
    _, calls = data.draw(answers("hermes"))
    arguments = json.dumps(calls[0])
    text = arguments if len(tools) == 1 else f'{{"name":"f","parameters":{arguments}}}'

    def make(_: Sequence[Tool]) -> ToolParser:
        return ForcedCallParser(tools)

    *_, whole = read_steps(make, [text])
    assert whole == Found("", (Call("f", arguments, has_end=True),))
    *_, pieces = read_steps(make, cut(text, chance))
    assert pieces == whole
    for length in range(len(text)):
        *_, found = read_steps(make, [text[:length]])
        for call in found.calls:
            assert (call.name, call.has_end) == ("f", False)
            assert arguments.startswith(call.arguments)
        if not found.calls:
            assert found.content == text[:length]


@pytest.mark.parametrize("tools", [TOOLS, TOOLS[:1]], ids=["several", "one"])
@pytest.mark.parametrize("text", ["1", "null", "[]", '"f"', '{"name": "f"}', "{", "[" * 100_000])
def test_a_forced_call_that_is_none_loses_no_text_and_has_no_end(
    tools: Sequence[Tool], text: str
) -> None:
    *_, found = read_steps(lambda _: ForcedCallParser(tools), [text])
    if found.calls and found.num_ended:
        assert isinstance(json.loads(found.calls[0].arguments), dict)
    else:
        assert (
            found.words == [] and found.content + "".join(c.arguments for c in found.calls) == text
        )
