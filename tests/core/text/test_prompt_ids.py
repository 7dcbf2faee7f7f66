"""Lists of integers are one prompt, whatever their size."""

from __future__ import annotations

import pytest

from headstock.errors import RequestError
from headstock.text.prompt import check_tokens, list_prompts


@pytest.mark.parametrize("token", [-(10**30), -1, 768, 10**30])
def test_a_list_of_integers_is_one_prompt_though_an_id_is_out_of_range(token: int) -> None:
    (tokens,) = list_prompts([5, token])
    with pytest.raises(
        RequestError, match=f"^prompt token ids must be integers from 0 to 767, got int {token}$"
    ):
        check_tokens(tokens, 768)  # type: ignore[arg-type]


def test_booleans_are_no_token_ids() -> None:
    assert list_prompts([True, False]) == [True, False]
