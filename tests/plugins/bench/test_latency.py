"""Latencies are what a caller waits for, from the moment that a request was due."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from attrs import define, field

from headstock import SamplingParams
from headstock.errors import EngineDied
from headstock.outputs import CompletionOutput, RequestMetrics, RequestOutput
from headstock_bench.headstock_engine import HeadstockEngine
from headstock_bench.latency import Latency, StreamTimes, summarize_streams
from headstock_bench.latency_workloads import LatencyWorkload
from headstock_bench.result import BenchmarkResult, Conditions
from headstock_bench.streams import stream_requests
from headstock_bench.turns import EngineTiming, run_in_turns


def make_output(*token_ids: int, error: str | None = None) -> RequestOutput:
    """An output of a stream."""
    reason = None if error is None else "error"
    answer = CompletionOutput(
        index=0, text="", token_ids=token_ids, finish_reason=reason, error=error
    )
    metrics = RequestMetrics(arrival=0.0, cached_tokens=1)
    return RequestOutput(
        request_id="0",
        prompt=None,
        prompt_tokens=(1,),
        outputs=(answer,),
        metrics=metrics,
        max_tokens=9,
    )


def make_workload(arrivals: tuple[float, ...] | None, count: int = 2) -> LatencyWorkload:
    """Requests whose prompts are their numbers."""
    return LatencyWorkload(
        name="work",
        prompts=tuple((number,) for number in range(count)),
        outputs=(2,) * count,
        temperature=0.6,
        arrivals=arrivals,
    )


@define
class ScriptedLLM:
    """Streams what `answer(number)` yields; it is its own engine and loop.

    `log` has the number of each request when it comes, and -1 - number when its stream is closed.
    """

    answer: Callable[[int], AsyncIterator[RequestOutput]]
    log: list[int] = field(factory=list)
    max_seq_len: int = 100
    peak_held_pages: int = 7
    draft_line: str = ""
    busy_polls: int = 0

    @property
    def engine(self) -> ScriptedLLM:
        return self

    loop = _session = engine

    def stats(self) -> ScriptedLLM:
        return self

    def since(self, earlier: object) -> ScriptedLLM:
        return self

    def reset_prefix_cache(self) -> None:
        pass

    def check_alive(self) -> None:
        pass

    @property
    def has_work(self) -> bool:
        self.busy_polls -= 1
        return self.busy_polls >= 0

    async def astream(
        self, prompt: list[int], params: SamplingParams
    ) -> AsyncIterator[RequestOutput]:
        assert self.busy_polls < 0, "sent while the engine was busy"
        self.log.append(prompt[0])
        try:
            async for output in self.answer(prompt[0]):
                yield output
        finally:
            self.log.append(-1 - prompt[0])


PARAMS = [SamplingParams(max_tokens=2)] * 2


def run_streams(llm: Any, workload: LatencyWorkload) -> list[StreamTimes]:
    """Run a workload; what the caller of each request saw."""
    return stream_requests(llm, workload, PARAMS)[0]


def test_percentiles_are_interpolated_over_all_requests_and_over_all_gaps() -> None:
    streams = [
        StreamTimes(arrival=10.0, times=(10.1, 10.2, 10.4), token_ids=(1, 2, 3)),
        StreamTimes(arrival=20.0, times=(20.3, 20.6), token_ids=(1, 2)),
    ]
    latency = summarize_streams(streams)
    # First tokens after 100 and 300 ms; gaps of 100, 200 and 300 ms.
    assert latency.ttft_p50_ms == pytest.approx(200) and latency.ttft_p99_ms == pytest.approx(298)
    assert latency.itl_p50_ms == pytest.approx(200) and latency.itl_p99_ms == pytest.approx(298)
    assert (latency.finished, latency.num_tokens, latency.error) == (2, 5, None)


def test_streams_of_one_piece_have_no_gaps() -> None:
    latency = summarize_streams([StreamTimes(arrival=0.0, times=(0.5,), token_ids=(1, 2))])
    assert (latency.ttft_p50_ms, latency.itl_p50_ms, latency.itl_p99_ms) == (500.0, None, None)


def test_a_request_that_failed_is_not_finished_and_its_tokens_count() -> None:
    streams = [
        StreamTimes(arrival=0.0, times=(), token_ids=(), error="refused"),
        StreamTimes(arrival=0.0, times=(0.5,), token_ids=(1,)),
        StreamTimes(arrival=0.0, times=(0.5,), token_ids=(1,), error="the step failed"),
    ]
    latency = summarize_streams(streams)
    assert (latency.finished, latency.num_tokens, latency.error) == (1, 2, "refused")


@pytest.mark.feature("V8")
def test_a_request_is_late_from_the_moment_that_it_was_due() -> None:
    async def answer(number: int) -> AsyncIterator[RequestOutput]:
        if number == 0:
            time.sleep(0.1)  # this event loop cannot send the second request meanwhile
        yield make_output(1)
        yield make_output()  # text without a token is no token
        yield make_output(2, 3)

    first, second = run_streams(ScriptedLLM(answer), make_workload((0.0, 0.02)))
    assert second.arrival - first.arrival == pytest.approx(0.02)
    assert second.times[0] - second.arrival >= 0.079
    assert (first.token_ids, len(first.times)) == ((1, 2, 3), 2)


def test_no_request_is_sent_before_it_is_due() -> None:
    async def answer(number: int) -> AsyncIterator[RequestOutput]:
        yield make_output(1)

    first, second = run_streams(ScriptedLLM(answer), make_workload((0.03, 0.08)))
    assert first.times[0] >= first.arrival and second.times[0] >= second.arrival
    assert second.times[0] - first.arrival >= 0.049


def test_without_arrivals_each_request_finds_the_engine_idle() -> None:
    async def answer(number: int) -> AsyncIterator[RequestOutput]:
        yield make_output(1)
        llm.busy_polls = 3

    llm = ScriptedLLM(answer, busy_polls=2)
    streams = run_streams(llm, make_workload(None))
    assert llm.log == [0, -1, 1, -2]
    assert streams[1].arrival > streams[0].times[-1]


def test_an_engine_that_dies_ends_the_measurement_and_closes_the_other_streams() -> None:
    async def answer(number: int) -> AsyncIterator[RequestOutput]:
        yield make_output(1)
        if number == 1:
            raise EngineDied("lost")
        await asyncio.sleep(60)

    llm = ScriptedLLM(answer)
    with pytest.raises(EngineDied, match=r"^lost$"):
        run_streams(llm, make_workload((0.0, 0.01)))
    assert sorted(llm.log) == [-2, -1, 0, 1]


def test_some_failed_requests_leave_a_figure_and_all_of_them_none() -> None:
    async def answer(number: int) -> AsyncIterator[RequestOutput]:
        if number in failing:
            yield make_output(error="refused")
        else:
            yield make_output(1)
            yield make_output(2)

    llm: Any = ScriptedLLM(answer)
    failing = {1}
    (timing,) = run_in_turns([HeadstockEngine(llm, "1")], make_workload((0.0, 0.0)), 1)
    (latency,) = timing.latencies
    assert (latency.finished, latency.num_tokens, latency.error) == (1, 2, "refused")
    assert timing.tokens == ((1, 2), ())
    failing = {0, 1}
    with pytest.raises(EngineDied, match=r"work: every request failed, so .* no result: refused"):
        run_in_turns([HeadstockEngine(llm, "1")], make_workload((0.0, 0.0)), 1)


@pytest.mark.feature("V8")
def test_a_figure_has_the_median_of_each_percentile_and_the_fewest_finished() -> None:
    def latency(base: float, finished: int) -> Latency:
        return Latency(
            ttft_p50_ms=base + 1,
            ttft_p99_ms=base + 2,
            itl_p50_ms=base + 3,
            itl_p99_ms=base + 4,
            finished=finished,
            num_tokens=finished * 2,
            error=None if finished == 2 else "refused",
        )

    runs = (latency(30, 2), latency(10, 1), latency(20, 2))
    timing = EngineTiming(
        engine="e", mode="m", version="1", seconds=(1.0, 4.0, 2.0), latencies=runs
    )
    names = "version cpu torch python shape weights dtype attn cache scheduler runner ops kv_dtype"
    conditions = Conditions(
        **dict.fromkeys(names.split(), "x"),
        commit=None,
        gpu=None,
        threads=1,
        batch=8,
        batch_tokens=64,
        overlap=True,
        page_size=16,
    )
    result = BenchmarkResult(
        conditions=conditions,
        workload=make_workload((0.0, 0.0)),
        timing=timing,
        peak_kv_pages=1,
        cached_tokens=0,
        preemptions=0,
        seed=1,
    )
    record = result.to_json()
    assert [
        record[f"{kind}_{percent}_ms"] for kind in ("ttft", "itl") for percent in ("p50", "p99")
    ] == [
        21,
        22,
        23,
        24,
    ]
    assert record["runs_ttft_p99_ms"] == [32, 12, 22]
    # The medians: 4 tokens, of 4, 2 and 4, and 2 seconds.
    assert (record["finished"], record["requests"], record["out_tok_s"]) == (1, 2, 2.0)
    text = "\n".join(result.format_lines())
    assert "TTFT      p50 21.00 ms (11.00 to 31.00), p99 22.00 ms (12.00 to 32.00)" in text
    assert "ITL       p50 23.00 ms (13.00 to 33.00), p99 24.00 ms (14.00 to 34.00)" in text
    assert "requests  1 of 2 finished" in text and "failed    refused" in text


def test_the_first_sixteen_requests_warm_up_and_then_all_are_measured() -> None:
    async def answer(number: int) -> AsyncIterator[RequestOutput]:
        yield make_output(1)

    llm: Any = ScriptedLLM(answer)
    run_in_turns([HeadstockEngine(llm, "1")], make_workload(None, 18), 1)
    assert [number for number in llm.log if number >= 0] == [*range(16), *range(18)]
