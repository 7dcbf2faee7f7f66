"""Reasoning, told from the answer however the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from often import count_examples

from headstock.text.reasoning import (
    MARKS,
    ReasoningMarks,
    ReasoningSplitter,
    ReasoningState,
    find_first_state,
    find_marks,
)

THINK, QWEN = MARKS["think"], MARKS["qwen3"]
START, INSIDE, AFTER = ReasoningState


def split(
    pieces: list[str], state: ReasoningState = START, marks: ReasoningMarks = THINK
) -> tuple[str, str]:
    splitter = ReasoningSplitter(marks, state)
    parts = [*map(splitter.feed, pieces), splitter.finish()]
    return "".join(reasoning for reasoning, _ in parts), "".join(answer for _, answer in parts)


@pytest.mark.feature("W4")
@pytest.mark.parametrize(
    ("state", "text", "reasoning", "answer"),
    [
        (START, "<think>\nTwo.\n\n</think>\n\nFive.\n", "Two.", "Five.\n"),
        (START, " \n<think>a\n\nb</think>c", "a\n\nb", "c"),
        (START, "<think></think>", "", ""),
        (START, "Five.", "", "Five."),
        (START, "Five. <think>no</think>", "", "Five. <think>no</think>"),
        (START, " <thin", "", " <thin"),
        (START, "  \n", "", "  \n"),
        (START, "", "", ""),
        # cut off in the middle
        (START, "<think>a <b", "a <b", ""),
        (START, "<think>a\n</thi", "a\n</thi", ""),
        (START, "<think>a\n\n", "a", ""),
        # the prompt has opened it, or closed it
        (INSIDE, "\nTwo.</think>\nFive.", "Two.", "Five."),
        (INSIDE, "Two <think> so", "Two <think> so", ""),
        (INSIDE, "Two", "Two", ""),
        (INSIDE, "", "", ""),
        (AFTER, "\n\nFive.\n<think>", "", "Five.\n<think>"),
        (AFTER, "<think>a</think>", "", "<think>a</think>"),
        # a second time is text
        (START, "<think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
        (START, "<think>a</think>\n\n  b\n", "a", "  b\n"),
        (START, "<think>x <think> y</think>b", "x <think> y", "b"),
        # right behind the first, it is the same mark again
        (START, "<think>\n<think>a</think>\n</think>\nb", "a", "b"),
        (START, "<think><think>", "", ""),
        (START, "<think>a</think></think> b </think>", "a", " b </think>"),
        (INSIDE, "<think>\na</think>b", "a", "b"),
        (INSIDE, " <thin", " <thin", ""),
        (AFTER, "</think>\n\nb", "", "b"),
        (AFTER, "\n </thin", "", " </thin"),
    ],
)
@pytest.mark.parametrize("marks", [THINK, QWEN])
def test_a_text_is_split_the_same_whole_cut_once_and_by_characters(
    marks: ReasoningMarks, state: ReasoningState, text: str, reasoning: str, answer: str
) -> None:
    assert_split(text, (reasoning, answer), state, marks)


def assert_split(
    text: str, parts: tuple[str, str], state: ReasoningState, marks: ReasoningMarks
) -> None:
    """Assert that a text comes apart so, however it is cut."""
    assert split([text], state, marks) == parts
    assert split(list(text), state, marks) == parts
    for cut in range(1, len(text)):
        assert split([text[:cut], "", text[cut:]], state, marks) == parts


@pytest.mark.feature("W4")
@pytest.mark.parametrize(
    ("text", "reasoning", "answer"),
    [
        ("hm\n</think>\n\nHi", "hm", "Hi"),
        ("\n hm </think></think> Hi </think>", " hm ", " Hi </think>"),
        ("</think>Hi", "", "Hi"),
        # An opening mark behind other text is quoted, and the closing one is not alone.
        ("a <think> b </think> c", "", "a <think> b </think> c"),
    ],
)
def test_a_closing_mark_alone_ends_reasoning_where_that_is_declared(
    text: str, reasoning: str, answer: str
) -> None:
    assert_split(text, (reasoning, answer), START, THINK)
    assert_split(text, ("", text), START, QWEN)
    assert_split(text, ("", text), START, ReasoningMarks("<think>", "</think>"))


def test_a_plain_answer_streams_at_once_unless_a_closing_mark_may_make_it_reasoning() -> None:
    assert ReasoningSplitter(QWEN, START).feed("Hi") == ("", "Hi")
    assert ReasoningSplitter(THINK, AFTER).feed("Hi") == ("", "Hi")
    splitter = ReasoningSplitter(THINK, START)
    assert splitter.feed("Hi") == ("", "")
    assert splitter.finish() == ("", "Hi")


SHREDS = ("<think>", "</think>", "<", "think", ">", "/", "\n", " ", "a")


@given(
    st.sampled_from([THINK, QWEN]),
    st.sampled_from(ReasoningState),
    st.lists(st.sampled_from(SHREDS), max_size=10),
    st.sets(st.integers(0, 60), max_size=8),
)
@settings(max_examples=count_examples(150))
def test_no_cut_changes_what_is_found(
    marks: ReasoningMarks, state: ReasoningState, shreds: list[str], borders: set[int]
) -> None:
    text = "".join(shreds)
    cuts = sorted(each for each in borders if each <= len(text))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = split([text], state, marks)
    assert split(pieces, state, marks) == whole == split(list(text), state, marks)


@pytest.mark.feature("W4")
def test_the_end_of_the_prompt_says_where_an_answer_begins() -> None:
    for prompt, state in (
        ("<|im_start|>assistant\n", START),
        ("<|im_start|>assistant\n<think>\n", INSIDE),
        ("<|im_start|>assistant\n<think>", INSIDE),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", AFTER),
        ("<|im_start|>user\nwhat is <think>?<|im_end|>\n<|im_start|>assistant\n", START),
    ):
        assert find_first_state(prompt, THINK) is state


def test_the_marks_are_those_of_the_template_or_of_the_setting() -> None:
    cuts = "{{ content.split('</think>')[-1] }}"
    assert find_marks("auto", cuts) == QWEN
    # DeepSeek-R1's template, which opens no reasoning, and that of a later model
    assert find_marks("auto", cuts + "<\uff5cAssistant\uff5c>") == THINK
    assert find_marks("auto", cuts + "<\uff5cAssistant\uff5c><think>") == QWEN
    assert find_marks("auto", "[THINK]{{ x }}[/THINK]") == MARKS["mistral"]
    assert find_marks("auto", "{{ messages }}") is None
    assert find_marks("off", "</think>") is None
    assert find_marks("think", "") == THINK
    text = "[THINK]a[/THINK]b"
    assert split(list(text), marks=MARKS["mistral"]) == ("a", "b")
