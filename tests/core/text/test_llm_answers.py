"""How answers of the LLM object end, and their streams."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from often import count_examples

from headstock import LLM, RequestOutput, SamplingParams
from headstock.outputs import CompletionOutput, Update
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
    (answer,) = llm.generate(
        "x", SamplingParams(skip_special_tokens=False, include_stop_str_in_output=True)
    )[0].outputs
    assert answer.text == "hello fox<|end|>"
    (answer,) = llm.generate("x", SamplingParams(ignore_eos=True))[0].outputs
    assert (answer.text, answer.finish_reason) == ("hello fox", "length")


def test_a_stop_token_id_is_the_stop_reason(scripted: Make, tokenizer: Tokenizer) -> None:
    llm, _ = scripted(script=saying(tokenizer, "hello fox"))
    second = tokenizer.encode("hello fox")[1]
    (answer,) = llm.generate("x", SamplingParams(stop_token_ids=[second]))[0].outputs
    assert (answer.finish_reason, answer.stop_reason, len(answer.token_ids)) == ("stop", second, 2)


@pytest.mark.parametrize("pace", [1, 3, 50])
def test_a_stop_string_ends_the_answer_and_the_request(
    scripted: Make, tokenizer: Tokenizer, pace: int
) -> None:
    llm, loop = scripted(script=saying(tokenizer, "the quick brown fox " * 5), pace=pace)
    (answer,) = llm.generate("x", SamplingParams(stop=["ck bro", "zzz"]))[0].outputs
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("the qui", "stop", "ck bro")
    assert (
        tokenizer.decode(answer.token_ids).startswith("the quick bro")
        and len(answer.token_ids) < 20
    )
    ended_by_itself = pace == 50  # it said all in the piece that holds the stop string
    assert loop.aborted == ([] if ended_by_itself else ["0"]), "it runs on"
    assert loop.rows == {}
    (kept,) = llm.generate("x", SamplingParams(stop="ck bro", include_stop_str_in_output=True))[
        0
    ].outputs
    assert kept.text == "the quick bro"


def test_a_stop_string_waits_for_min_tokens(scripted: Make, tokenizer: Tokenizer) -> None:
    llm, _ = scripted(script=saying(tokenizer, "ababab"))
    tokens = len(tokenizer.encode("ababab"))
    assert llm.generate("x", SamplingParams(stop="ab"))[0].outputs[0].text == ""
    (answer,) = llm.generate("x", SamplingParams(stop="ab", min_tokens=tokens - 1))[0].outputs
    assert (answer.text, answer.stop_reason) == ("abab", "ab")


@pytest.mark.parametrize("pace", [1, 6])
def test_a_stop_string_that_is_complete_with_the_last_of_min_tokens_does_not_count(
    scripted: Make, tokenizer: Tokenizer, pace: int
) -> None:
    assert len(tokenizer.encode("ababab")) == 6
    for least, length in ((1, 2), (2, 4), (3, 4), (4, 6)):
        llm, _ = scripted(script=saying(tokenizer, "ababab"), pace=pace)
        (answer,) = llm.generate("x", SamplingParams(stop="ab", min_tokens=least))[0].outputs
        assert (len(answer.token_ids), answer.stop_reason) == (length, "ab"), f"min_tokens {least}"
        assert answer.text == "ababab"[: length - 2]


@pytest.mark.feature("I19")
@settings(
    max_examples=count_examples(200),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    text=st.text("ab 日😀é", min_size=1, max_size=20),
    stops=st.lists(st.text("ab 日😀", min_size=1, max_size=3), max_size=3),
    pace=st.integers(1, 4),
)
def test_streamed_text_equals_final_text(
    scripted: Make, tokenizer: Tokenizer, text: str, stops: list[str], pace: int
) -> None:
    llm, _ = scripted(script=saying(tokenizer, text), pace=pace)
    params = SamplingParams(stop=stops)
    pieces = list(llm.stream("x", params))
    (whole,) = llm.generate("x", params)[0].outputs
    llm.close()
    assert "".join(piece.outputs[0].text for piece in pieces) == whole.text
    assert [token for piece in pieces for token in piece.outputs[0].token_ids] == whole.token_ids
    assert [piece.finished for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1].outputs[0].finish_reason == whole.finish_reason == "stop"
    ends = [text.find(stop) for stop in stops if stop in text]
    assert (
        whole.text == text
        if not ends
        else len(whole.text) < len(text) and text.startswith(whole.text)
    )
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
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(
        output.prompt_token_ids
    )
    assert output.prompt_logprobs[0] is None and output.prompt_logprobs[1] is not None
    plain = llm.generate("hello", SHORT)[0]
    assert plain.outputs[0].logprobs is None and plain.outputs[0].cumulative_logprob is None


def test_the_first_answers_cached_tokens_count_where_another_has_the_first_token(
    scripted: Make,
) -> None:
    llm, _ = scripted()
    params = SamplingParams(n=2, max_tokens=9)
    prompt_request = llm._session.input_processor.process("hello", params)
    for seconds, (index, cached) in enumerate(((1, 16), (1, None), (0, 4), (0, None))):
        update = Update(id=prompt_request.requests[index].id, tokens=(5,), cached_tokens=cached)
        metrics = prompt_request.apply_update(update, float(seconds)).metrics
    assert (metrics.cached_tokens, metrics.first_token, metrics.end) == (4, 0.0, None)


def test_answers_beyond_those_in_flight_are_submitted_as_others_end(scripted: Make) -> None:
    llm, _ = scripted(running=1)

    async def answer() -> RequestOutput:
        async with asyncio.timeout(60):
            return await llm.generate_async("hello", SamplingParams(n=7, max_tokens=3))

    outputs = asyncio.run(answer()).outputs
    assert [len(each.token_ids) for each in outputs] == [3] * 7


def test_an_answer_keeps_none_of_its_pieces_but_the_last(
    scripted: Make,
) -> None:
    llm, _ = scripted()
    params = SamplingParams(max_tokens=200)
    prompt_request = llm._session.input_processor.process("hello", params)
    before = count_pieces()
    for token in range(200):
        prompt_request.apply_update(Update(id=prompt_request.request_id, tokens=(token,)), 0.0)
    assert count_pieces() <= before + 1, "the last one alone is kept"
    (whole,) = prompt_request.final_output().outputs
    assert whole.token_ids == list(range(200))
    whole.token_ids.clear()  # the caller's own
    assert len(prompt_request.final_output().outputs[0].token_ids) == 200


def count_pieces() -> int:
    """Pieces that something refers to."""
    return sum(type(each) is CompletionOutput for each in gc.get_objects())


def test_cached_tokens_of_several_answers_are_those_of_the_first(scripted: Make) -> None:
    llm, _ = scripted()
    for order in itertools.permutations(range(3)):
        request = llm._session.input_processor.process("hello", SamplingParams(n=3, max_tokens=1))
        for index in order:
            update = Update(
                id=request.requests[index].id,
                tokens=(5,),
                cached_tokens=(4, 16, 32)[index],
                finish_reason="length",
            )
            request.apply_update(update, 0.0)
        assert request.final_output().metrics.cached_tokens == 4, f"told in the order {order}"


def test_preemptions_of_several_answers_are_added(scripted: Make) -> None:
    llm, _ = scripted(preempted=2)
    (output,) = llm.generate("hello", SamplingParams(n=3, max_tokens=2))
    assert output.metrics.preemptions == 6, "preemptions"


@pytest.mark.parametrize("pace", [1, 6])
def test_scores_of_tokens_behind_a_stop_string_do_not_count(
    scripted: Make, tokenizer: Tokenizer, pace: int
) -> None:
    llm, _ = scripted(script=saying(tokenizer, "ababab"), pace=pace)
    (answer,) = llm.generate("x", SamplingParams(stop="ba", logprobs=0))[0].outputs
    assert (len(answer.token_ids), answer.cumulative_logprob) == (3, -1.5)
    assert answer.logprobs is not None and len(answer.logprobs) == 3


def test_of_several_prompts_the_lowest_priority_goes_first(scripted: Make) -> None:
    llm, loop = scripted()
    llm.generate(["a", "b", "c", "d"], SHORT, priority=[0, 5, -3, 0])
    assert [request.id for request in loop.seen] == ["2", "0", "3", "1"], "order"
    assert [request.priority for request in loop.seen] == [3, 0, 0, -5]
