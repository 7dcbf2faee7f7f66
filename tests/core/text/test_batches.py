"""Tokens decoded many at once give the text of tokens decoded one by one."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstock.text.detokenizer import Detokenizer
from headstock.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer(byte_level: Path) -> Tokenizer:
    """A byte-level one."""
    return Tokenizer(byte_level)


@pytest.mark.feature("I19")
@given(cuts=st.lists(st.integers(1, 9), max_size=30), data=st.data())
def test_text_does_not_depend_on_how_many_tokens_come_at_once(
    tokenizer: Tokenizer, cuts: list[int], data: st.DataObject
) -> None:
    tokens = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=sum(cuts)))
    whole, parts = Detokenizer(tokenizer), Detokenizer(tokenizer)
    singly = "".join(whole.add_token(token) for token in tokens) + whole.flush()
    pieces, start = [], 0
    for cut in [*cuts, len(tokens)]:
        pieces.append(parts.add_tokens(tokens[start : start + cut]))
        start += cut

    assert "".join(pieces) + parts.flush() == singly
