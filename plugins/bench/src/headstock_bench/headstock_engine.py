"""headstock as a benchmarked engine."""

from __future__ import annotations

import time
from collections.abc import Sequence

from headstock import LLM, EngineDied, RequestMetrics, SamplingParams, UsageError
from headstock.llm import get_session
from headstock_bench.latency import summarize_streams
from headstock_bench.latency_workloads import LatencyWorkload
from headstock_bench.streams import stream_requests
from headstock_bench.turns import TimedRun
from headstock_bench.workloads import Workload


class HeadstockEngine:
    """Runs workloads on an LLM, each from an empty prefix index.

    Of the last run:
        cached_tokens: prompt tokens that came from the prefix index
        peak_pages: the maximum number of pages held by requests, over all KV groups
        preemptions: times that a request lost its pages and was computed again
        drafts: a line about accepted drafts; empty if none was verified
    """

    engine = "headstock"

    def __init__(self, llm: LLM, version: str, mode: str = "generate") -> None:
        self.mode = mode
        self.llm = llm
        self.session = get_session(llm)
        self.version = version
        self.cached_tokens = 0
        self.peak_pages = 0
        self.preemptions = 0
        self.drafts = ""
        self.before = self.session.engine.stats()

    def run(self, workload: Workload) -> TimedRun:
        """Run the workload once.   raises: UsageError when it is too long, EngineDied"""
        self.check_length(workload)
        params = [
            SamplingParams(
                temperature=workload.temperature,
                seed=workload.seed + number,
                max_tokens=count,
                # Random weights may end a text anywhere, but every engine must do the same work.
                ignore_eos=True,
            )
            for number, count in enumerate(workload.outputs)
        ]
        # the warm-up and earlier runs left the same prompts in the index
        self.session.loop.reset_prefix_cache()
        self.before = self.session.engine.stats()
        if isinstance(workload, LatencyWorkload):
            return self._run_streams(workload, params)
        prompts = [list(prompt) for prompt in workload.prompts]
        begin = time.perf_counter()
        outputs = self.llm.generate(prompts, params)
        seconds = time.perf_counter() - begin
        answers = [output.outputs[0] for output in outputs]
        for number, answer in enumerate(answers):
            if answer.error is not None:
                raise EngineDied(
                    f"{workload.name}: request {number} failed, so there is no result: "
                    f"{answer.error}"
                )
        self._store_counts([output.metrics for output in outputs])
        return TimedRun(seconds, tuple(tuple(answer.token_ids) for answer in answers))

    def _run_streams(self, workload: LatencyWorkload, params: Sequence[SamplingParams]) -> TimedRun:
        """Run requests that arrive one by one.   raises: EngineDied when all of them fail"""
        streams, seconds = stream_requests(self.llm, workload, params)
        errors = [stream.error for stream in streams if stream.error is not None]
        if len(errors) == len(streams):
            raise EngineDied(
                f"{workload.name}: every request failed, so there is no result: {errors[0]}"
            )
        self._store_counts([stream.metrics for stream in streams if stream.metrics is not None])
        tokens = tuple(stream.token_ids for stream in streams)
        return TimedRun(seconds, tokens, summarize_streams(streams))

    def _store_counts(self, metrics: Sequence[RequestMetrics]) -> None:
        """Record the counts of the last run.   writes: the four counts"""
        # For both kinds of run: a count that only one kind sets would keep the value of the last
        # run of that kind.
        self.cached_tokens = sum(request.cached_tokens or 0 for request in metrics)
        self.preemptions = sum(request.preemptions or 0 for request in metrics)
        stats = self.session.engine.stats()
        self.peak_pages = stats.peak_held_pages
        self.drafts = stats.since(self.before).draft_line

    def check_length(self, workload: Workload) -> None:
        """Raise UsageError if a request is too long; truncated, it would be different work."""
        max_seq_len = self.session.engine.max_seq_len
        if workload.max_request_tokens > max_seq_len:
            raise UsageError(
                f"{workload.name} has requests of {workload.max_request_tokens} tokens, but "
                f"sequences may have {max_seq_len} here; raise --max-seq-len or the pool, or "
                "choose another workload or model"
            )
