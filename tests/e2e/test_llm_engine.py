"""The LLM object over the real engine and the bundled model."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from headstock import LLM, RequestOutput, SamplingParams
from headstock.llm import get_session

PROMPTS = [
    "Once upon a time",
    "One morning, Anna",
    "12 + 30 =",
    "The boat",
    "Once upon a time, in a village",
]
GREEDY = SamplingParams(temperature=0, max_tokens=24)
ENDLESS = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", num_pages=256) as llm:
        yield llm


def drained(llm: LLM) -> bool:
    """Whether every request ends, and every page is free or cached then."""
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        stats = llm._session.engine.stats()
        if (
            stats.running == stats.waiting == 0
            and stats.free_pages + stats.cached_pages == stats.total_pages
        ):
            return True
        time.sleep(0.01)
    return False


@pytest.mark.feature("I11")
def test_a_batch_equals_its_prompts_alone(llm: LLM) -> None:
    together = llm.generate(PROMPTS, GREEDY)
    assert [output.outputs for output in together] == [
        llm.generate(prompt, GREEDY)[0].outputs for prompt in PROMPTS
    ]
    assert all(output.outputs[0].text for output in together)


@pytest.mark.feature("I19")
def test_streamed_text_equals_final_text(llm: LLM) -> None:
    for prompt in PROMPTS:
        pieces = [piece.outputs[0] for piece in llm.stream(prompt, GREEDY)]
        (whole,) = llm.generate(prompt, GREEDY)[0].outputs
        assert "".join(piece.text for piece in pieces) == whole.text
        assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids


def test_a_stop_string_cuts_the_text_where_it_begins(llm: LLM) -> None:
    (whole,) = llm.generate(PROMPTS[0], GREEDY)[0].outputs
    stop = whole.text[11:17]
    (cut,) = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=24, stop=stop))[
        0
    ].outputs
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (
        whole.text[: whole.text.index(stop)],
        "stop",
        stop,
    )
    assert drained(llm)


def test_answer_i_of_n_is_the_answer_to_seed_plus_i(llm: LLM) -> None:
    (several,) = llm.generate(PROMPTS[0], SamplingParams(n=3, seed=5, max_tokens=12))
    alone = [
        llm.generate(PROMPTS[0], SamplingParams(seed=5 + i, max_tokens=12))[0].outputs[0]
        for i in range(3)
    ]
    assert [answer.token_ids for answer in several.outputs] == [
        answer.token_ids for answer in alone
    ]
    assert len({answer.text for answer in several.outputs}) > 1


def test_several_answers_count_the_prompt_tokens_that_were_there_before_them(llm: LLM) -> None:
    prompt = {"prompt_token_ids": [5 + i % 300 for i in range(40)]}
    llm._session.loop.reset_prefix_cache()
    counts = [
        llm.generate(prompt, SamplingParams(n=3, seed=5, max_tokens=2))[0].metrics.cached_tokens
        for _ in (0, 1)
    ]
    assert counts == [0, 32], "cached_tokens"


def test_logprobs_rank_the_greedy_token_first(llm: LLM) -> None:
    (output,) = llm.generate(
        PROMPTS[0], SamplingParams(temperature=0, max_tokens=5, logprobs=2, prompt_logprobs=1)
    )
    (answer,) = output.outputs
    assert answer.logprobs is not None and answer.cumulative_logprob is not None
    chosen = [
        entries[token] for entries, token in zip(answer.logprobs, answer.token_ids, strict=True)
    ]
    assert [entry.rank for entry in chosen] == [1] * 5 and all(
        len(entries) == 2 for entries in answer.logprobs
    )
    assert answer.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in chosen))
    assert "".join(entry.decoded_token for entry in chosen) == answer.text
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(
        output.prompt_token_ids
    )


@pytest.mark.parametrize("most", [0, 1, 3])
def test_a_sampled_token_comes_first_with_its_rank(llm: LLM, most: int) -> None:
    unlikely = dict.fromkeys((17, 300, 444, 500), 100.0)
    settings = {"temperature": 2.0, "max_tokens": 6, "seed": 11, "logit_bias": unlikely}
    (output,) = llm.generate(
        PROMPTS[0], SamplingParams(**settings, logprobs=most, prompt_logprobs=most)
    )
    (answer,) = output.outputs
    # What each token scored, by asking for all those before it as a prompt.
    ids = [*output.prompt_token_ids, *answer.token_ids]
    assert answer.logprobs is not None and output.prompt_logprobs is not None
    tables = [*output.prompt_logprobs[1:], *answer.logprobs]
    ranks = []
    for count, table in enumerate(tables, start=1):
        assert table is not None
        (found,) = llm.generate(
            {"prompt_token_ids": ids[:count]},
            SamplingParams(temperature=0, max_tokens=1, logprobs=20),
        )
        (likely,) = found.outputs[0].logprobs or ()
        scores = [entry.logprob for entry in likely.values()]
        token, *others = table
        assert token == ids[count]
        rank = table[token].rank
        assert rank is not None
        ranks.append(rank)
        if rank <= 20:
            assert scores[rank - 1] == pytest.approx(table[token].logprob, abs=1e-3)
        else:
            assert table[token].logprob <= scores[-1] + 1e-3
        assert others == [each for each in list(likely)[:most] if each != token]
    assert max(ranks) > 20 and min(ranks) == 1


def test_chat_answers_in_the_template(llm: LLM) -> None:
    (output,) = llm.chat([{"role": "user", "content": "What is 2 + 3?"}], GREEDY)
    assert output.outputs[0].finish_reason == "stop" and "5" in output.outputs[0].text


def test_closing_a_stream_frees_its_pages(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], ENDLESS)
    prompt = next(stream).prompt_token_ids
    before = llm._session.engine.stats()
    assert before.running == 1
    stream.close()  # type: ignore[attr-defined]
    assert drained(llm)
    # It did not end by itself.
    written = llm._session.engine.stats().output_tokens - before.output_tokens
    assert written < get_session(llm).engine.max_seq_len - len(prompt) - 1


def test_an_interrupt_frees_everything_and_the_engine_lives_on(llm: LLM) -> None:
    def interrupt_soon() -> None:
        threading.Timer(0.3, signal.raise_signal, [signal.SIGINT]).start()
        llm.generate(PROMPTS * 8, ENDLESS)

    with pytest.raises(KeyboardInterrupt):
        interrupt_soon()
    assert drained(llm)
    assert llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].text


async def all_at_once(llm: LLM) -> list[RequestOutput]:
    return await asyncio.gather(*(llm.generate_async(prompt, GREEDY) for prompt in PROMPTS))


def test_async_answers_equal_the_others(llm: LLM) -> None:
    found = asyncio.run(all_at_once(llm))
    assert [output.outputs for output in found] == [
        output.outputs for output in llm.generate(PROMPTS, GREEDY)
    ]


def test_two_engines_live_in_one_process_and_agree(llm: LLM) -> None:
    with LLM("demo", num_pages=64, page_size=4, cache_type="naive") as second:
        for one, other in zip(
            second.generate(PROMPTS, GREEDY), llm.generate(PROMPTS, GREEDY), strict=True
        ):
            assert one.outputs == other.outputs
    assert llm.generate(PROMPTS[0], GREEDY)
