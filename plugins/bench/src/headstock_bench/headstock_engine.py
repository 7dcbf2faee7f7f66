"""headstock as a contestant."""

from __future__ import annotations

import time
from collections.abc import Sequence

from headstock import LLM, EngineDied, RequestMetrics, SamplingParams, UsageError
from headstock.llm import session_of
from headstock_bench.latency import summarize_streams
from headstock_bench.latency_workloads import LatencyWorkload
from headstock_bench.streams import stream_requests
from headstock_bench.turns import TimedRun
from headstock_bench.workloads import Workload


class HeadstockEngine:
    """An LLM at the work; the prefix index is empty when a run begins.

    After a run, `cached_tokens` counts the prompt tokens that came from the index, `peak_pages` the
    most pages that requests held at once, and `preemptions` the times that a request lost its pages
    and was computed again.
    """

    engine = "headstock"
    mode = "generate"

    def __init__(self, llm: LLM, version: str) -> None:
        self.llm = llm
        self.version = version
        self.cached_tokens = 0
        self.peak_pages = 0
        self.preemptions = 0

    def run(self, workload: Workload) -> TimedRun:
        """Do the work once.   raises: UsageError when it does not fit the engine, EngineDied"""
        self.check_length(workload)
        params = [
            SamplingParams(
                temperature=workload.temperature,
                seed=workload.seed + number,
                max_tokens=count,
                ignore_eos=True,
            )
            for number, count in enumerate(workload.outputs)
        ]
        session_of(self.llm).loop.reset_prefix_cache()
        if isinstance(workload, LatencyWorkload):
            return self._run_streams(workload, params)
        begin = time.perf_counter()
        outputs = self.llm.generate([list(prompt) for prompt in workload.prompts], params)
        seconds = time.perf_counter() - begin
        answers = [output.outputs[0] for output in outputs]
        for number, answer in enumerate(answers):
            if answer.error is not None:
                raise EngineDied(
                    f"{workload.name}: request {number} failed, so there is no figure: "
                    f"{answer.error}"
                )
        self._store_counts([output.metrics for output in outputs])
        return TimedRun(seconds, tuple(answer.token_ids for answer in answers))

    def _run_streams(self, workload: LatencyWorkload, params: Sequence[SamplingParams]) -> TimedRun:
        """The run of requests that come one by one; some may fail.   raises: EngineDied"""
        streams, seconds = stream_requests(self.llm, workload, params)
        errors = [stream.error for stream in streams if stream.error is not None]
        if len(errors) == len(streams):
            raise EngineDied(
                f"{workload.name}: every request failed, so there is no figure: {errors[0]}"
            )
        self._store_counts([stream.metrics for stream in streams if stream.metrics is not None])
        tokens = tuple(stream.token_ids for stream in streams)
        return TimedRun(seconds, tokens, summarize_streams(streams))

    def _store_counts(self, metrics: Sequence[RequestMetrics]) -> None:
        """Set what figures say of the run that has just ended."""
        self.cached_tokens = sum(request.cached_tokens or 0 for request in metrics)
        self.preemptions = sum(request.preemptions or 0 for request in metrics)
        self.peak_pages = session_of(self.llm).engine.stats().peak_held_pages

    def check_length(self, workload: Workload) -> None:
        """Raise UsageError when a request is too long: cut to what fits, it would be another
        workload.
        """
        max_seq_len = session_of(self.llm).engine.max_seq_len
        if workload.max_request_tokens > max_seq_len:
            raise UsageError(
                f"{workload.name} has requests of {workload.max_request_tokens} tokens, but "
                f"sequences may have {max_seq_len} here; raise --max-seq-len or the pool, or "
                "choose another workload or model"
            )
