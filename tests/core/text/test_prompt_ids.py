"""Lists of integers are one prompt, whatever their size."""

from __future__ import annotations

import numpy as np
import pytest

from headstock.errors import RequestError
from headstock.text.prompt import Prompt, check_prompt, check_tokens, list_prompts, split_prompt


@pytest.mark.parametrize("token", [-(10**30), -1, 768, 10**30])
def test_a_list_of_integers_is_one_prompt_though_an_id_is_out_of_range(token: int) -> None:
    (tokens,) = list_prompts([5, token])
    with pytest.raises(
        RequestError, match=f"^prompt token ids must be integers from 0 to 767, got int {token}$"
    ):
        check_tokens(tokens, 768)  # type: ignore[arg-type]


def test_booleans_are_no_token_ids() -> None:
    assert list_prompts([True, False]) == [True, False]


@pytest.mark.parametrize("token", [-1, 768, 10**30, True, 1.0])
@pytest.mark.parametrize("made", ["by its user", "of a list"])
def test_each_token_of_a_prompt_is_checked_however_it_was_made(token: object, made: str) -> None:
    tokens = (5, token)
    known = made == "of a list" and type(token) is int and abs(token) < 2**31
    prompt = Prompt(None, tokens, are_ints=known)  # type: ignore[arg-type]

    with pytest.raises(
        RequestError, match=r"^prompt token ids must be integers from 0 to 767, got"
    ):
        check_prompt(prompt, vocab=768, max_seq_len=9, length_hint="")


def test_integers_of_other_types_are_token_ids() -> None:
    for tokens in ((5, 7), (np.int64(5), np.int32(7))):
        prompt = Prompt(None, tokens)  # type: ignore[arg-type]
        check_prompt(prompt, vocab=768, max_seq_len=9, length_hint="")
    assert split_prompt([5, 7]) == ((5, 7), "")
