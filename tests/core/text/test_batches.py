"""Tokens decoded many at once give the text of tokens decoded one by one."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstock import SamplingParams
from headstock.outputs import Update
from headstock.text.completion import CompletionBuilder
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


@given(st.lists(st.lists(st.integers(0, 331), max_size=5), max_size=12), st.booleans())
def test_a_plain_piece_is_what_the_long_way_makes_of_it(
    tokenizer: Tokenizer, updates: list[list[int]], skips: bool
) -> None:
    params = SamplingParams(skip_special_tokens=skips)
    plain, other = (CompletionBuilder(3, params, tokenizer) for _ in range(2))
    assert plain.is_plain
    other.is_plain = False
    for tokens in updates:
        update = Update(id="a", tokens=tuple(tokens))
        assert plain.apply_update(update) == other.apply_update(update)
    end = Update(id="a", tokens=(7, 0), finish_reason="stop", stop_token=0)
    assert plain.apply_update(end) == other.apply_update(end)
