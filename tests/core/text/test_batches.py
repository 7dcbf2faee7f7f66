"""News taken in batches says what news taken piece by piece says."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstock.engine.update import TokenLogprob, Update
from headstock.flight import Mailbox, News
from headstock.text.detokenizer import Detokenizer
from headstock.text.tokenizer import Tokenizer

NAMES = st.sampled_from("abc")


@given(st.lists(st.tuples(NAMES, st.lists(st.integers(0, 9), min_size=1, max_size=3)), max_size=40), st.booleans())
def test_I19_news_until_the_end_holds_each_token_once_and_in_order(
    news: list[tuple[str, list[int]]], scored: bool
) -> None:
    mailbox = Mailbox(eager=False)
    seen: list[str] = []
    for at, (name, tokens) in enumerate(news):
        scores = tuple(TokenLogprob(token, -float(at)) for token in tokens) if scored else None
        first = None if name in seen else 7
        seen += [name] * (name not in seen)
        mailbox.put(News(Update(id=name, tokens=tuple(tokens), logprobs=scores, cached_tokens=first), float(at)))
    assert mailbox.batches.empty(), "nothing is told before the end"
    for name in seen:
        mailbox.put(News(Update(id=name, finish_reason="stop"), 99.0))

    for name in seen:
        pieces = mailbox.get()
        wanted = [token for who, tokens in news if who == name for token in tokens]
        first_at = next(float(at) for at, (who, _) in enumerate(news) if who == name)
        assert {piece.update.id for piece in pieces} == {name} and len(pieces) == 2
        assert [token for piece in pieces for token in piece.update.tokens] == wanted
        assert (pieces[0].at, pieces[1].at) == (first_at, 99.0) and pieces[0].update.cached_tokens == 7
        assert (pieces[0].update.finish_reason, pieces[1].update.finish_reason) == (None, "stop")
        if scored:
            assert [entry.token for piece in pieces for entry in piece.update.logprobs or ()] == wanted
    assert not mailbox.pending


def test_an_eager_mailbox_hands_over_each_piece() -> None:
    mailbox = Mailbox(eager=True)
    mailbox.put(News(Update(id="a", tokens=(1,)), 0.0))
    mailbox.put(News(Update(id="a", tokens=(2,)), 1.0))

    assert [len(mailbox.get()), len(mailbox.get())] == [1, 1]


def test_news_that_ends_at_once_is_one_piece() -> None:
    mailbox = Mailbox(eager=False)
    mailbox.put(News(Update(id="a", tokens=(5,), finish_reason="length", cached_tokens=0), 3.0))
    (piece,) = mailbox.get()

    assert piece.update == Update(id="a", tokens=(5,), finish_reason="length", cached_tokens=0) and piece.at == 3.0


@pytest.fixture(scope="session")
def tokenizer(byte_level: Path) -> Tokenizer:
    """A byte-level one."""
    return Tokenizer(byte_level)


@given(cuts=st.lists(st.integers(1, 9), max_size=30), data=st.data())
def test_I19_text_does_not_depend_on_how_many_tokens_come_at_once(
    tokenizer: Tokenizer, cuts: list[int], data: st.DataObject
) -> None:
    tokens = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=sum(cuts)))
    whole, parts = Detokenizer(tokenizer), Detokenizer(tokenizer)
    singly = "".join(whole.feed_one(token) for token in tokens) + whole.finish()
    pieces, start = [], 0
    for cut in [*cuts, len(tokens)]:
        pieces.append(parts.feed(tokens[start : start + cut]))
        start += cut

    assert "".join(pieces) + parts.finish() == singly
