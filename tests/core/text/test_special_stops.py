"""Stop strings that are, or hold, special tokens, which the text leaves out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from often import count_examples

from headstock import LLM, SamplingParams
from headstock.outputs import CompletionOutput, Update
from headstock.text.completion import CompletionBuilder, join_pieces
from headstock.text.tokenizer import Tokenizer

Make = Callable[..., tuple[LLM, Any]]

IM = 1
"""The special token <|im|> of the vocabularies."""


@pytest.fixture(scope="module")
def bytewise(byte_fallback: Path) -> Tokenizer:
    """A vocabulary with bytes, whose special token is </s>."""
    return Tokenizer(byte_fallback)


def build(tokenizer: Tokenizer, parts: list[list[int]], **params: Any) -> list[CompletionOutput]:
    """The pieces of an answer whose tokens come in these parts; `end` ends it at its last token."""
    end = {"finish_reason": "length"}
    if stop_token := params.pop("stop_token", None):
        end = {"finish_reason": "stop", "stop_token": stop_token}
    builder = CompletionBuilder(0, SamplingParams(**params), tokenizer)
    pieces = []
    for at, part in enumerate(parts, start=1):
        update = Update(id="a", tokens=tuple(part), **(end if at == len(parts) else {}))
        pieces.append(builder.apply_update(update))
        if builder.is_finished:
            break
    return pieces


def find_end(
    tokenizer: Tokenizer, tokens: list[int], stops: list[str], least: int, include: bool
) -> tuple[str, str | None, int]:
    """By the definition: the text, the stop string and the number of tokens of an answer, each of
    whose tokens is a letter or <|im|>.
    """
    for count in range(least + 1, len(tokens) + 1):
        shown = tokenizer.decode(tokens[:count], skip_special_tokens=False)
        hidden = tokenizer.decode(tokens[:count])
        for stop in sorted(stops, key=len, reverse=True):
            text = shown if "<|im|>" in stop else hidden
            has_grown = tokens[count - 1] != IM or "<|im|>" in stop
            if has_grown and text.endswith(stop):
                before = text[: -len(stop)].replace("<|im|>", "")
                return before + stop if include else before, stop, count
    return tokenizer.decode(tokens), None, len(tokens)


STOPS = ("<|im|>", "a<|im|>", "<|im|>b", "ab<|im|>a", "<|im|><|im|>", "ab", "b", "ba<|im|>", "aab")


@settings(max_examples=count_examples(500))
@given(
    parts=st.lists(st.lists(st.sampled_from("abi"), max_size=4), min_size=1, max_size=6),
    stops=st.lists(st.sampled_from(STOPS), min_size=1, max_size=4, unique=True),
    least=st.integers(0, 4),
    include=st.booleans(),
)
def test_an_answer_ends_with_the_first_complete_stop_string(
    tokenizer: Tokenizer, parts: list[list[str]], stops: list[str], least: int, include: bool
) -> None:
    ids = {"a": tokenizer.encode("a")[0], "b": tokenizer.encode("b")[0], "i": IM}
    tokens = [[ids[letter] for letter in part] for part in parts]
    flat = [token for part in tokens for token in part]
    pieces = build(
        tokenizer, tokens, stop=stops, min_tokens=least, include_stop_str_in_output=include
    )
    whole = join_pieces(pieces)
    text, stop, count = find_end(tokenizer, flat, stops, least, include)
    assert (whole.text, whole.stop_reason, len(whole.token_ids)) == (text, stop, count)
    assert whole.finish_reason == ("length" if stop is None else "stop")


def test_text_is_held_back_only_while_it_may_begin_a_stop_string(tokenizer: Tokenizer) -> None:
    a, b = (tokenizer.encode(letter)[0] for letter in "ab")
    pieces = build(tokenizer, [[b], [a], [IM], [b], [b], [IM], [b]], stop=["a<|im|>a"])
    assert [piece.text for piece in pieces] == ["b", "", "", "ab", "b", "", "b"]


def test_an_end_token_that_completes_a_stop_string_ends_with_it(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("ab")
    pieces = build(tokenizer, [tokens, [IM]], stop=["b<|im|>"], stop_token=IM)
    whole = join_pieces(pieces)
    assert (whole.text, whole.stop_reason, whole.token_ids) == ("a", "b<|im|>", [*tokens, IM])


@pytest.mark.parametrize("include", [True, False])
def test_a_special_token_comes_behind_the_bytes_before_it(
    bytewise: Tokenizer, include: bool
) -> None:
    a, line, end = (bytewise.backend.token_to_id(each) for each in ("a", "<0x0A>", "</s>"))
    params = {"stop": ["\n</s>\na"], "include_stop_str_in_output": include}
    for before in ([a], [a, line], []):
        tokens = [[each] for each in (*before, line, end, line, a, a)]
        whole = join_pieces(build(bytewise, tokens, **params))
        assert whole.text == bytewise.decode(before) + ("\n</s>\na" if include else "")
        assert (whole.stop_reason, len(whole.token_ids)) == ("\n</s>\na", len(tokens) - 1)


def test_a_special_token_that_ends_no_stop_string_changes_no_text(bytewise: Tokenizer) -> None:
    names = ("<0xC3>", "</s>", "<0xA9>", "<0x0A>", "</s>", "<0xFF>", "b")
    tokens = [bytewise.backend.token_to_id(each) for each in names]
    for cut in range(len(tokens)):
        pieces = build(bytewise, [tokens[:cut], tokens[cut:]], stop=["</s>zz", "\n</s>z"])
        assert join_pieces(pieces).text == bytewise.decode(tokens)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("include", [True, False])
def test_a_special_token_is_a_stop_string_whether_shown_or_not(
    scripted: Make, tokenizer: Tokenizer, skip: bool, include: bool
) -> None:
    tokens = [*tokenizer.encode("hello"), IM, *tokenizer.encode(" fox")]
    llm, loop = scripted(script=lambda request: tokens)
    params = SamplingParams(
        stop=["<|im|>"],
        skip_special_tokens=skip,
        include_stop_str_in_output=include,
        logprobs=0,
    )
    for answer in (
        llm.generate("x", params)[0].outputs[0],
        join_pieces(piece.outputs[0] for piece in llm.stream("x", params)),
    ):
        assert answer.text == ("hello<|im|>" if include else "hello")
        assert (answer.finish_reason, answer.stop_reason) == ("stop", "<|im|>")
        assert answer.token_ids == tokens[: tokens.index(IM) + 1]
        assert answer.logprobs is not None and len(answer.logprobs) == len(answer.token_ids)
    assert loop.aborted == ["0", "1"]


def test_text_that_was_read_ahead_of_a_special_token_is_read_once(bytewise: Tokenizer) -> None:
    a, line, end = (bytewise.backend.token_to_id(each) for each in ("a", "<0x0A>", "</s>"))
    tokens = [[each] for each in (a, line, end, a, a, end, a)]
    whole = join_pieces(build(bytewise, tokens, stop=["aa</s>"]))
    assert (whole.text, whole.stop_reason, len(whole.token_ids)) == ("a\n", "aa</s>", 6)
