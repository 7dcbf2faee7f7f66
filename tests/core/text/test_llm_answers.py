"""How answers of the LLM object end, and their streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headstock import LLM, SamplingParams
from headstock.text.tokenizer import Tokenizer

Make = Callable[..., tuple[LLM, Any]]
SHORT = SamplingParams(max_tokens=8, temperature=0)


def saying(tokenizer: Tokenizer, text: str) -> Callable[[Any], list[int]]:
    return lambda request: [*tokenizer.encode(text), 0]


def test_eos_ends_an_answer_and_is_not_in_its_text(scripted: Make, tokenizer: Tokenizer) -> None:
    llm, _ = scripted(script=saying(tokenizer, "hello fox"))
    (answer,) = llm.generate("x")[0].outputs
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("hello fox", "stop", None)
    assert answer.token_ids[-1] == 0
    (answer,) = llm.generate("x", SamplingParams(skip_special_tokens=False, include_stop_str_in_output=True))[0].outputs
    assert answer.text == "hello fox<|end|>"
    (answer,) = llm.generate("x", SamplingParams(ignore_eos=True))[0].outputs
    assert (answer.text, answer.finish_reason) == ("hello fox", "length")


def test_a_stop_token_id_is_the_stop_reason(scripted: Make, tokenizer: Tokenizer) -> None:
    llm, _ = scripted(script=saying(tokenizer, "hello fox"))
    second = tokenizer.encode("hello fox")[1]
    (answer,) = llm.generate("x", SamplingParams(stop_token_ids=[second]))[0].outputs
    assert (answer.finish_reason, answer.stop_reason, len(answer.token_ids)) == ("stop", second, 2)


@pytest.mark.parametrize("pace", [1, 3, 50])
def test_a_stop_string_ends_the_answer_and_the_request(scripted: Make, tokenizer: Tokenizer, pace: int) -> None:
    llm, loop = scripted(script=saying(tokenizer, "the quick brown fox " * 5), pace=pace)
    (answer,) = llm.generate("x", SamplingParams(stop=["ck bro", "zzz"]))[0].outputs
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("the qui", "stop", "ck bro")
    assert tokenizer.decode(answer.token_ids).startswith("the quick bro") and len(answer.token_ids) < 20
    assert loop.rows == {} or loop.aborted == ["0"]
    (kept,) = llm.generate("x", SamplingParams(stop="ck bro", include_stop_str_in_output=True))[0].outputs
    assert kept.text == "the quick bro"


def test_a_stop_string_waits_for_min_tokens(scripted: Make, tokenizer: Tokenizer) -> None:
    llm, _ = scripted(script=saying(tokenizer, "ababab"))
    tokens = len(tokenizer.encode("ababab"))
    assert llm.generate("x", SamplingParams(stop="ab"))[0].outputs[0].text == ""
    (answer,) = llm.generate("x", SamplingParams(stop="ab", min_tokens=tokens - 1))[0].outputs
    assert (answer.text, answer.stop_reason) == ("abab", "ab")


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.text("ab 日😀é", min_size=1, max_size=20),
    stops=st.lists(st.text("ab 日😀", min_size=1, max_size=3), max_size=3),
    pace=st.integers(1, 4),
)
def test_I19_streamed_text_equals_final_text(
    scripted: Make, tokenizer: Tokenizer, text: str, stops: list[str], pace: int
) -> None:
    llm, _ = scripted(script=saying(tokenizer, text), pace=pace)
    params = SamplingParams(stop=stops)
    pieces = list(llm.stream("x", params))
    (whole,) = llm.generate("x", params)[0].outputs
    llm.close()
    assert "".join(piece.outputs[0].text for piece in pieces) == whole.text
    assert tuple(token for piece in pieces for token in piece.outputs[0].token_ids) == whole.token_ids
    assert [piece.finished for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1].outputs[0].finish_reason == whole.finish_reason == "stop"
    ends = [text.find(stop) for stop in stops if stop in text]
    assert whole.text == text if not ends else len(whole.text) < len(text) and text.startswith(whole.text)
    assert "\ufffd" not in whole.text


def test_logprobs_are_one_mapping_a_token(scripted: Make) -> None:
    llm, _ = scripted(pace=3)
    params = SamplingParams(max_tokens=4, logprobs=1, prompt_logprobs=0)
    (output,) = llm.generate("hello fox", params)
    (answer,) = output.outputs
    assert answer.logprobs is not None and len(answer.logprobs) == 4
    assert answer.logprobs[0][answer.token_ids[0]].logprob == -0.5
    assert answer.logprobs[0][answer.token_ids[0]].rank == 1
    assert answer.cumulative_logprob == -2.0
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert output.prompt_logprobs[0] is None and output.prompt_logprobs[1] is not None
    plain = llm.generate("hello", SHORT)[0]
    assert plain.outputs[0].logprobs is None and plain.outputs[0].cumulative_logprob is None
