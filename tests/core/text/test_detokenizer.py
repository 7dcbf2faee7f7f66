"""The incremental detokenizer against decoding all tokens at once."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from often import count_examples

from headstock.text.detokenizer import WINDOW, Detokenizer
from headstock.text.tokenizer import Tokenizer

FOUR = "\U000f5678"
"""A character that shares no two bytes with the training text: one token a byte."""
TEXTS = [FOUR, "😀", "日本語", "é", "a", " ", "<|im|>", "\ufffd", "👨‍👩‍👧", "ab"]


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback"])
def either(request: pytest.FixtureRequest) -> Tokenizer:
    directory: Path = request.getfixturevalue(request.param)
    return Tokenizer(directory)


def streamed(tokenizer: Tokenizer, tokens: list[int], skip: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    return [*(detokenizer.add_token(token) for token in tokens), detokenizer.flush()]


@settings(max_examples=count_examples(400))
@given(data=st.data(), skip=st.booleans())
def test_stream_equals_decode_of_all_tokens(
    either: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    tokens = data.draw(st.lists(st.integers(0, either.vocab_size + 2), max_size=60))
    assert "".join(streamed(either, tokens, skip)) == either.decode(
        tokens, skip_special_tokens=skip
    )


@settings(max_examples=count_examples(300))
@given(data=st.data(), skip=st.booleans())
def test_many_tokens_at_once_have_the_text_of_one_by_one(
    either: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    # Few distinct ids, so that unknown ones and halves of characters follow each other.
    ids = st.sampled_from([*either.encode(FOUR), 40, either.vocab_size + 2])
    parts = data.draw(st.lists(st.lists(ids, max_size=3 * WINDOW), max_size=4))
    detokenizer = Detokenizer(either, skip_special_tokens=skip)
    pieces = [*map(detokenizer.add_tokens, parts), detokenizer.flush()]
    singly = "".join(streamed(either, [*chain(*parts)], skip))
    assert "".join(pieces) == singly

    detokenizer = Detokenizer(either, skip_special_tokens=skip)
    last = parts[-1] if parts else []
    pieces = [*map(detokenizer.add_tokens, parts[:-1]), detokenizer.add_last_tokens(last)]
    assert "".join(pieces) == singly


@settings(max_examples=count_examples(300))
@given(data=st.data(), texts=st.lists(st.sampled_from(TEXTS), max_size=12))
def test_stream_of_cut_texts_equals_decode(
    either: Tokenizer, data: st.DataObject, texts: list[str]
) -> None:
    tokens = either.encode("".join(texts))
    start = data.draw(st.integers(0, len(tokens)))
    stop = data.draw(st.integers(start, len(tokens)))
    for skip in (True, False):
        pieces = streamed(either, tokens[start:stop], skip)
        assert "".join(pieces) == either.decode(tokens[start:stop], skip_special_tokens=skip)


def test_emoji_halves_are_held_back_and_no_replacement_leaks(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(FOUR)
    assert len(tokens) == 4
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.add_token(token) for token in tokens] == ["", "", "", "\U000f5678"]
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("before", range(WINDOW + 1))
def test_a_character_of_four_tokens_is_whole_wherever_the_window_is_cut(
    tokenizer: Tokenizer, before: int
) -> None:
    text = "x" * before + FOUR * 9 + "é"
    tokens = tokenizer.encode(text)
    assert len(tokens) >= before + 37

    assert "".join(streamed(tokenizer, tokens, skip=True)) == text


def test_a_long_invalid_run_does_not_hold_the_text_back(tokenizer: Tokenizer) -> None:
    lead = tokenizer.encode("🦜")[0]
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.add_token(lead) for _ in range(100)]
    assert pieces == ["", *["\ufffd"] * 99]
    assert len(detokenizer.window) <= 16
    assert detokenizer.flush() == "\ufffd"


def test_special_tokens_are_shown_when_asked_for(tokenizer: Tokenizer) -> None:
    assert "".join(streamed(tokenizer, [1, 2], skip=True)) == tokenizer.decode([2])
    assert "".join(streamed(tokenizer, [1, 2], skip=False)).startswith("<|im|>")
