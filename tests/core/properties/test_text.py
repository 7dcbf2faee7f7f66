"""Answers: where they end, to the token, and what their text is."""

from __future__ import annotations

from itertools import takewhile

import pytest
from core.properties.drawn import EXAMPLES
from core.text.conftest import ScriptedLoop
from core.text.test_stop import expected as up_to_the_stop
from hypothesis import assume, given
from hypothesis import strategies as st
from toy_text import EOS

from headstock import LLM, SamplingParams
from headstock.outputs import CompletionOutput
from headstock_conformance.scheduler.toy_device import VOCAB, next_token

PROMPTS = st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=8)
TEXTS = st.text("ab 日😀é", min_size=1, max_size=16)
STOPS = st.lists(st.text("ab 日😀é", min_size=1, max_size=3), max_size=3)


def said(prompt: list[int], count: int) -> list[int]:
    """The next so many tokens of the toy model."""
    history = list(prompt)
    for _ in range(count):
        history.append(next_token(history))
    return history[len(prompt) :]


def answer(llm: LLM, prompt: list[int], **params: object) -> CompletionOutput:
    """The greedy answer to a prompt."""
    (output,) = llm.generate(
        {"prompt_token_ids": prompt}, SamplingParams(**({"temperature": 0.0} | params))
    )
    return output.outputs[0]


@pytest.mark.feature("I8")
@EXAMPLES
@given(prompt=PROMPTS, beyond=st.integers(-2, 3))
def test_an_answer_ends_at_its_first_end_of_sequence_token(
    llm: LLM, prompt: list[int], beyond: int
) -> None:
    tokens = said(prompt, 24)
    end = tokens.index(EOS) + 1 if EOS in tokens else 20
    most = min(max(end + beyond, 1), 24)
    kinds = [
        SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=ignore)
        for ignore in (False, True)
    ]
    found, ignored = (
        output.outputs[0] for output in llm.generate([{"prompt_token_ids": prompt}] * 2, kinds)
    )
    ended = EOS in tokens[:most]

    assert found.token_ids == tokens[: end if ended else most]
    assert (found.finish_reason, found.stop_reason) == ("stop" if ended else "length", None)
    assert len(ignored.token_ids) == most and ignored.finish_reason == "length"


@pytest.mark.feature("I9")
@EXAMPLES
@given(prompt=PROMPTS, place=st.integers(0, 9), least=st.integers(0, 10))
def test_an_answer_ends_at_its_first_stop_token_after_min_tokens(
    llm: LLM, prompt: list[int], place: int, least: int
) -> None:
    stop = said(prompt, 10)[place]
    found = answer(
        llm, prompt, max_tokens=12, min_tokens=least, stop_token_ids=[stop], ignore_eos=True
    )
    history = list(prompt)
    for count in range(12):
        token = next_token(history)
        if count < least and token == stop:
            token = (token + 1) % VOCAB  # banned, so the next best
        history.append(token)
        if token == stop:
            break

    assert found.token_ids == history[len(prompt) :]
    assert found.finish_reason == ("stop" if history[-1] == stop else "length")
    assert found.stop_reason == (stop if history[-1] == stop else None)


@pytest.mark.feature("I9")
@EXAMPLES
@given(prompt=PROMPTS, start=st.integers(0, 12), length=st.integers(1, 3))
def test_an_answer_ends_with_the_token_that_completes_a_stop_string(
    llm: LLM, prompt: list[int], start: int, length: int
) -> None:
    tokens, decode = said(prompt, 12), llm._session.tokenizer.decode

    def text_of(count: int) -> str:
        """What so many tokens add to the prompt, which may end within a character."""
        whole = decode([*prompt, *tokens[:count]])
        before = decode(prompt)
        same = takewhile(lambda pair: pair[0] == pair[1], zip(before, whole, strict=False))
        return whole[len([*same]) :]

    text = text_of(12)
    stop = text[start : start + length]
    assume(stop and "\ufffd" not in stop)
    found = answer(llm, prompt, max_tokens=12, stop=[stop], ignore_eos=True)
    count = next(count for count in range(13) if stop in text_of(count))

    assert found.token_ids == tokens[:count]
    assert (found.finish_reason, found.stop_reason) == ("stop", stop)
    assert found.text == text[: text.index(stop)]


@pytest.mark.feature("I10")
@EXAMPLES
@given(prompt=PROMPTS, most=st.integers(1, 20))
def test_an_answer_ends_at_max_tokens_when_nothing_else_ends_it(
    llm: LLM, prompt: list[int], most: int
) -> None:
    found = answer(llm, prompt, max_tokens=most, ignore_eos=True)

    assert (found.token_ids, found.finish_reason) == (said(prompt, most), "length")


@pytest.mark.feature("I19")
@EXAMPLES
@given(
    prompt=PROMPTS, stops=st.lists(st.sampled_from(["ab", "a", "é", "日本", "B", "CD"]), max_size=3)
)
def test_streamed_text_is_the_final_text(llm: LLM, prompt: list[int], stops: list[str]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=9, stop=stops)
    pieces = [piece.outputs[0] for piece in llm.stream({"prompt_token_ids": prompt}, params)]
    whole = answer(llm, prompt, max_tokens=9, stop=stops)

    assert "".join(piece.text for piece in pieces) == whole.text
    assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + [
        whole.finish_reason
    ]


Told = tuple[LLM, ScriptedLoop]


def pieces_of(told: Told, text: str, pace: int, params: SamplingParams) -> list[str]:
    """The streamed pieces of an answer that is `text`, if nothing ends it before."""
    llm, loop = told
    loop.script, loop.pace = lambda request: [*llm._session.tokenizer.encode(text), 0], pace
    return [piece.outputs[0].text for piece in llm.stream("x", params)]


@pytest.mark.feature("I20")
@EXAMPLES
@given(text=TEXTS, stops=STOPS.filter(bool), pace=st.integers(1, 4), include=st.booleans())
def test_a_stop_string_and_what_follows_are_no_part_of_the_answer(
    told: Told, text: str, stops: list[str], pace: int, include: bool
) -> None:
    params = SamplingParams(stop=stops, include_stop_str_in_output=include)

    assert "".join(pieces_of(told, text, pace, params)) == up_to_the_stop(text, stops, include)[0]


@pytest.mark.feature("I21")
@EXAMPLES
@given(text=TEXTS, stops=STOPS, pace=st.integers(1, 4))
def test_no_piece_ends_within_a_character(
    told: Told, text: str, stops: list[str], pace: int
) -> None:
    tokens = told[0]._session.tokenizer.encode(text)
    pieces = pieces_of(told, text, pace, SamplingParams(stop=stops))
    for count in range(len(pieces) + 1):
        assert text.startswith("".join(pieces[:count])), (
            "a piece shows what is no character of the text"
        )

    whole = up_to_the_stop(text, stops, include=False)[0]
    assert "".join(pieces) == whole
    # may end within a character, and says so
    cut = pieces_of(told, text, pace, SamplingParams(max_tokens=1))
    assert "".join(cut) == told[0]._session.tokenizer.decode(tokens[:1])


@pytest.mark.feature("I21")
@pytest.mark.parametrize("text", ["日", "😀", "é"])
def test_the_texts_have_characters_of_several_tokens(told: Told, text: str) -> None:
    assert len(told[0]._session.tokenizer.encode(text + text[::-1])) >= 2
