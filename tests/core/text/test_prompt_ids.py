"""Prompts as token ids, and texts of which there would be far too many."""

from __future__ import annotations

from array import array
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headstock.errors import RequestError, describe_type
from headstock.text.prompt import (
    MAX_CUT,
    PROBED_CHARACTERS,
    Prompt,
    check_prompt,
    check_tokens,
    list_prompts,
    split_prompt,
    tokenize_end,
    tokenize_prompt,
)
from headstock.text.tokenizer import Tokenizer


@pytest.mark.parametrize("token", [-(10**30), -1, 768, 10**30])
def test_a_list_of_integers_is_one_prompt_though_an_id_is_out_of_range(token: int) -> None:
    (tokens,) = list_prompts([5, token])
    with pytest.raises(
        RequestError, match=f"^prompt token ids: expected integers from 0 to 767, got int {token}$"
    ):
        check_tokens(tokens, 768)  # type: ignore[arg-type]


def test_booleans_are_no_token_ids() -> None:
    assert list_prompts([True, False]) == [True, False]


@pytest.mark.parametrize("token", [-1, 768, 10**30, True, 1.0])
@pytest.mark.parametrize("made", ["by its user", "of a list"])
def test_each_token_of_a_prompt_is_checked_however_it_was_made(token: object, made: str) -> None:
    tokens = (5, token)
    known = made == "of a list" and type(token) is int and abs(token) < 2**31
    prompt = Prompt(None, array("i", tokens) if known else tokens)  # type: ignore[arg-type]

    with pytest.raises(
        RequestError, match=r"^prompt token ids: expected integers from 0 to 767, got"
    ):
        check_prompt(prompt, vocab=768, max_seq_len=9, length_hint="")


def test_integers_of_other_types_are_token_ids() -> None:
    for tokens in ((5, 7), (np.int64(5), np.int32(7))):
        prompt = Prompt(None, tokens)  # type: ignore[arg-type]
        check_prompt(prompt, vocab=768, max_seq_len=9, length_hint="")
    assert split_prompt([5, 7]) == ((5, 7), "")


def test_the_last_tokens_of_a_text_are_those_of_the_whole_text(tokenizer: Tokenizer) -> None:
    text = "aaaaa bb\n" * 200
    whole = tokenizer.encode(text)
    for count in (1, 7, len(whole), len(whole) + 1):
        cut = tokenize_end(text, tokenizer, count, max_seq_len=9, add_special_tokens=True)
        assert list(cut) == whole[-count:]


def test_a_text_of_which_all_tokens_would_be_too_many_is_not_cut() -> None:
    letters: Any = SimpleNamespace(encode=lambda text, add_special_tokens: range(len(text)))
    text = "a" * (PROBED_CHARACTERS * MAX_CUT + 1)
    with pytest.raises(RequestError, match="too many to cut; send its end alone"):
        tokenize_end(text, letters, 5, max_seq_len=9, add_special_tokens=True)


class Id(IntEnum):
    """A token id that is an integer of another type than int."""

    SEVEN = 7


@pytest.mark.parametrize("wrong", [True, -1, 2**31, 10**30, 1.0, "7", None, [7], np.float32(7)])
def test_one_wrong_id_in_a_list_is_named_before_the_model_is_known(wrong: object) -> None:
    with pytest.raises(RequestError) as caught:
        tokenize_prompt([5, wrong, 7], WordTokenizer())  # type: ignore[list-item]

    assert str(caught.value) == (
        f"prompt token ids: expected integers from 0 to 2147483647, got {describe_type(wrong)}"
    )


@pytest.mark.parametrize(
    "tokens", [[5, 7, 2**31 - 1], (5, 7, 2**31 - 1), [np.int64(5), Id.SEVEN, 2**31 - 1]]
)
def test_the_ids_of_a_list_are_packed_as_they_are_checked(tokens: list[int]) -> None:
    prompt = tokenize_prompt(tokens, WordTokenizer())

    assert list(prompt.tokens) == list(tokens)
    assert prompt.ids.dtype == np.int32 and prompt.ids.tolist() == [5, 7, 2**31 - 1]
    assert not prompt.ids.flags.writeable


class WordTokenizer(Tokenizer):
    """A token for each word; it notes the longest text that it was given."""

    def __init__(self) -> None:
        self.longest = 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.longest = max(self.longest, len(text))
        return [5] * len(text.split())


def tokenize(tokenizer: Tokenizer, text: str) -> int:
    prompt = tokenize_prompt(text, tokenizer, max_seq_len=100, length_hint=", or give more room")
    return len(prompt.tokens)


@pytest.mark.feature("S22", "W10")
def test_a_text_that_is_far_too_long_is_refused_by_its_beginning() -> None:
    tokenizer = WordTokenizer()
    with pytest.raises(RequestError) as caught:
        tokenize(tokenizer, "a " * 1_000_000)
    assert str(caught.value) == (
        "prompt has 2000000 characters, and far more tokens than sequences may have here (100); "
        "shorten the prompt, or give more room"
    )
    assert caught.value.parameter == "prompt" and tokenizer.longest <= 800


@pytest.mark.parametrize(("word", "count"), [("a", 399), ("a" * 99, 100), ("a" * 1000, 120)])
def test_a_text_that_may_not_be_far_too_long_is_tokenized_whole(word: str, count: int) -> None:
    assert tokenize(WordTokenizer(), f"{word} " * count) == count
