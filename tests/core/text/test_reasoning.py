"""Reasoning, told from the answer however the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headstock.text.reasoning import (
    MARKS,
    ReasoningMarks,
    ReasoningSplitter,
    ReasoningState,
    find_first_state,
    find_marks,
)

THINK = MARKS["think"]
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
        (START, "a</think>b", "", "a</think>b"),
        # cut off in the middle
        (START, "<think>a <b", "a <b", ""),
        (START, "<think>a\n</thi", "a\n</thi", ""),
        (START, "<think>a\n\n", "a", ""),
        # the prompt has opened it, or closed it
        (INSIDE, "\nTwo.</think>\nFive.", "Two.", "Five."),
        (INSIDE, "Two <think> so", "Two <think> so", ""),
        (AFTER, "\n\nFive.\n<think>", "", "Five.\n<think>"),
        (AFTER, "<think>a</think>", "", "<think>a</think>"),
        # a second time is text
        (START, "<think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
        (START, "<think>a</think>\n\n  b\n", "a", "  b\n"),
    ],
)
def test_a_text_is_split_the_same_whole_cut_once_and_by_characters(
    state: ReasoningState, text: str, reasoning: str, answer: str
) -> None:
    assert split([text], state) == (reasoning, answer)
    assert split(list(text), state) == (reasoning, answer)
    for cut in range(1, len(text)):
        assert split([text[:cut], "", text[cut:]], state) == (reasoning, answer)


SHREDS = ("<think>", "</think>", "<", "think", ">", "/", "\n", " ", "a")


@given(
    st.sampled_from(ReasoningState),
    st.lists(st.sampled_from(SHREDS), max_size=10),
    st.sets(st.integers(0, 60), max_size=8),
)
@settings(max_examples=150)
def test_no_cut_changes_what_is_found(
    state: ReasoningState, shreds: list[str], borders: set[int]
) -> None:
    text = "".join(shreds)
    cuts = sorted(each for each in borders if each <= len(text))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert split(pieces, state) == split([text], state) == split(list(text), state)


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
    assert find_marks("auto", "{{ content.split('</think>')[-1] }}") == THINK
    assert find_marks("auto", "[THINK]{{ x }}[/THINK]") == MARKS["mistral"]
    assert find_marks("auto", "{{ messages }}") is None
    assert find_marks("off", "</think>") is None
    assert find_marks("think", "") == THINK
    text = "[THINK]a[/THINK]b"
    assert split(list(text), marks=MARKS["mistral"]) == ("a", "b")
