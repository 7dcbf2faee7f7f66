"""A grammar that begins after reasoning: masks, and going back, against the plain definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_grammar import END, VOCAB, ToyMatcher

from headstock import RequestError
from headstock.grammar.delayed import DelayedMatcher
from headstock.spi.arrays import Ints
from headstock.structured_outputs import ReasoningTokens, StructuredOutputsParams

TOKENS = st.lists(st.integers(0, VOCAB - 2), max_size=20)
REASONING = (
    st.tuples(st.none() | st.integers(0, VOCAB - 2), st.integers(0, VOCAB - 2))
    .filter(lambda pair: pair[0] != pair[1])
    .map(lambda pair: ReasoningTokens(start=pair[0], end=pair[1]))
)


def make(reasoning: ReasoningTokens) -> DelayedMatcher:
    """A matcher of answers of four tokens after the reasoning."""
    return DelayedMatcher(ToyMatcher(4, -1), reasoning, [END])


def read_mask(matcher: DelayedMatcher) -> tuple[set[int], bool]:
    """The tokens that may come next, and whether the text may end."""
    mask = np.zeros(-(-VOCAB // 32), np.int32)
    may_end = matcher.fill_mask(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB]
    return set(bits.nonzero()[0].tolist()), may_end


def as_array(tokens: list[int]) -> Ints:
    """The tokens as a step has them."""
    return np.array(tokens, np.int32)


@given(TOKENS, REASONING)
def test_any_text_may_come_before_the_end_of_reasoning_and_no_end(
    text: list[int], reasoning: ReasoningTokens
) -> None:
    matcher = make(reasoning)
    begun = [] if reasoning.start is None else [reasoning.start]
    text = [*begun, *(token for token in text if token != reasoning.end)]

    assert matcher.advance(as_array(text)) == len(text)
    if text:
        assert read_mask(matcher) == (set(range(VOCAB)) - {END}, False)
    matcher.advance(as_array([reasoning.end]))
    plain = DelayedMatcher(ToyMatcher(4, -1), ReasoningTokens(end=0), [END])
    plain.advance(as_array([0]))
    assert matcher.has_begun and read_mask(matcher) == read_mask(plain)


@given(TOKENS, st.sets(st.integers(0, VOCAB - 2), min_size=1, max_size=3))
def test_reasoning_has_none_of_the_tokens_that_it_may_not_have(
    text: list[int], without: set[int]
) -> None:
    matcher = make(ReasoningTokens(end=VOCAB - 1, without=tuple(without)))
    count = next((at for at, token in enumerate(text) if token in without), len(text))

    assert matcher.advance(as_array(text)) == count
    assert read_mask(matcher) == (set(range(VOCAB)) - {END, *without}, False)
    matcher.rollback(count)
    assert matcher.advance(as_array(text[:count])) == count


@given(REASONING)
def test_the_first_token_begins_reasoning_or_the_grammar(reasoning: ReasoningTokens) -> None:
    allowed, may_end = read_mask(make(reasoning))
    plain = DelayedMatcher(ToyMatcher(4, -1), ReasoningTokens(end=0), [END])
    plain.advance(as_array([0]))
    first, _ = read_mask(plain)

    assert not may_end
    assert allowed == (
        set(range(VOCAB)) - {END} if reasoning.start is None else first | {reasoning.start}
    )


@given(TOKENS, TOKENS, REASONING, st.data())
def test_going_back_leaves_the_matcher_as_it_was(
    tokens: list[int], more: list[int], reasoning: ReasoningTokens, data: st.DataObject
) -> None:
    matcher = make(reasoning)
    count = matcher.advance(as_array(tokens))
    back = data.draw(st.integers(0, count))
    matcher.rollback(back)
    fresh = make(reasoning)
    fresh.advance(as_array(tokens[: count - back]))

    assert read_mask(matcher) == read_mask(fresh)
    assert matcher.advance(as_array(more)) == fresh.advance(as_array(more))
    assert read_mask(matcher) == read_mask(fresh)


@pytest.mark.parametrize(
    "tokens",
    [
        {},
        {"start": 1},
        {"start": 1, "end": 1},
        {"end": "a"},
        {"end": -1},
        {"end": 1, "x": 2},
        {"end": 1, "without": 5},
    ],
)
def test_what_are_no_tokens_is_refused(tokens: dict[str, object]) -> None:
    with pytest.raises(RequestError, match="after_reasoning"):
        StructuredOutputsParams(json_object=True, after_reasoning=tokens)  # type: ignore[arg-type]


def test_parameters_go_through_their_mapping() -> None:
    grammar = StructuredOutputsParams(regex="a+", after_reasoning=ReasoningTokens(end=7))
    assert StructuredOutputsParams(**grammar.as_dict()) == grammar  # type: ignore[arg-type]
