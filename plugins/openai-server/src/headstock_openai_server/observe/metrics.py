"""The data of `/metrics`: request counts and times, and the engine's latest counts."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from headstock.requests import EngineSession
from headstock_openai_server.api.operations import ERRORS

FIRST_TOKEN = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5),
    *(5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
BETWEEN_TOKENS = (
    *(0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
END_TO_END = (
    *(0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0),
    *(30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
"""Upper bounds in seconds: vLLM's, so that dashboards fit, and smaller ones for small models."""
TOKENS = (
    *(1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10_000.0),
    *(20_000.0, 50_000.0, 100_000.0, 200_000.0, 500_000.0, 1_000_000.0),
)
"""Upper bounds in tokens."""

OUTCOMES = ("stop", "length", "tool_calls", "abort", "error")
"""The possible finish reasons of an answer."""

STATUSES = (200, *ERRORS)
"""The statuses whose series exist from the start."""

VLLM = "vllm"
"""The prefix that adds vLLM's names."""

GAUGES = (
    ("requests_running", "num_requests_running", "requests that have a row"),
    ("requests_waiting", "num_requests_waiting", "requests that wait for a row"),
    ("kv_usage_ratio", "kv_cache_usage_perc", "share of KV pages that requests hold"),
    ("kv_pages_live", "kv_pages_live", "KV pages that requests hold"),
    ("kv_pages_cached", "kv_pages_cached", "KV pages that only the prefix index holds"),
    ("kv_pages_free", "kv_pages_free", "KV pages that nothing holds"),
    ("engine_silence_seconds", "engine_silence_seconds", "seconds since the engine said anything"),
)
COUNTERS = (
    ("prompt_tokens", "prompt_tokens", "prompt tokens of ended requests"),
    ("cached_prompt_tokens", "prompt_tokens_cached", "those from the prefix index"),
    ("output_tokens", "generation_tokens", "generated tokens"),
    ("preemptions", "num_preemptions", "preempted requests"),
    ("engine_steps", "engine_steps", "scheduling steps"),
    ("failed_requests", "failed_requests", "requests whose step failed"),
    ("corrupted_requests", "corrupted_requests", "those with logits that are not finite"),
    ("draft_tokens", "spec_decode_num_draft_tokens", "drafts that were verified"),
    ("accepted_draft_tokens", "spec_decode_num_accepted_tokens", "those that were right"),
)
"""headstock's name, vLLM's name, and the meaning."""
PREFIX_COUNTERS = (
    ("prompt_tokens", "prefix_cache_queries", "prompt tokens that were looked up"),
    ("cached_prompt_tokens", "prefix_cache_hits", "those from the prefix index"),
)
"""Series that vLLM has under two names; only served under its prefix."""


class ServedEngine(Protocol):
    """The data that the series need from the service.

    opened: the session, once the engine is ready
    num_sequences: answers that have not ended
    """

    opened: EngineSession | None
    num_sequences: int

    @property
    def silence(self) -> float:
        """Seconds since the engine's last message."""


class EngineCollector(Collector):
    """The series made from an engine's latest counts."""

    def __init__(self, prefix: str, model: str, service: ServedEngine) -> None:
        self.prefix = prefix
        self.model = model
        self.service = service

    def collect(self) -> Iterator[Metric]:
        """The series; none before the engine is ready."""
        session = self.service.opened
        if session is None:
            return
        stats, summary = session.engine.stats(), session.engine.summary
        live = stats.total_pages - stats.free_pages - stats.cached_pages
        values: dict[str, float] = {
            "requests_running": stats.running,
            # Requests that the engine has not received yet are waiting too.
            "requests_waiting": max(stats.waiting, self.service.num_sequences - stats.running),
            "kv_usage_ratio": live / stats.total_pages if stats.total_pages else 0.0,
            "kv_pages_live": live,
            "kv_pages_cached": stats.cached_pages,
            "kv_pages_free": stats.free_pages,
            "prompt_tokens": stats.prompt_tokens,
            "cached_prompt_tokens": stats.cached_tokens,
            "output_tokens": stats.output_tokens,
            "preemptions": stats.preemptions,
            "engine_steps": stats.steps,
            "failed_requests": stats.failed,
            "corrupted_requests": stats.not_finite,
            "draft_tokens": stats.draft_tokens,
            "accepted_draft_tokens": stats.accepted_draft_tokens,
            "engine_silence_seconds": self.service.silence,
        }
        yield from self._make_families(GaugeMetricFamily, GAUGES, values)
        yield from self._make_families(CounterMetricFamily, COUNTERS, values)
        if self.prefix == VLLM:
            yield from self._make_families(CounterMetricFamily, PREFIX_COUNTERS, values)
        steps = CounterMetricFamily(
            self._name("device_steps", "device_steps"),
            "steps of the device: replayed as a CUDA graph, or eager",
            labels=["model_name", "kind"],
        )
        steps.add_metric([self.model, "replayed"], stats.replayed_steps)
        steps.add_metric([self.model, "eager"], stats.executed_steps - stats.replayed_steps)
        yield steps
        info = InfoMetricFamily(f"{self.prefix}_engine", "the parts that serve the model")
        parts = ("attention", "cache", "scheduler", "runner", "ops", "device", "dtype", "kv_dtype")
        facts = {name: str(getattr(summary, name)) for name in parts}
        info.add_metric([], {"model_name": self.model, **facts})
        yield info
        cache = InfoMetricFamily(self._name("cache_config", "cache_config"), "the KV pool")
        sizes = {
            "block_size": str(summary.page_size),
            "num_gpu_blocks": str(stats.total_pages),
        }
        cache.add_metric([], {"model_name": self.model, **sizes})
        yield cache

    def _make_families(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        names: Iterable[tuple[str, str, str]],
        values: dict[str, float],
    ) -> Iterator[Metric]:
        for ours, theirs, text in names:
            family = kind(self._name(ours, theirs), text, labels=["model_name"])
            family.add_metric([self.model], values[ours])
            yield family

    def _name(self, ours: str, theirs: str) -> str:
        return name_series(self.prefix, ours, theirs)


def name_series(prefix: str, ours: str, theirs: str) -> str:
    """The name of a series: vLLM's own, with its colon, under vLLM's prefix."""
    return f"{VLLM}:{theirs}" if prefix == VLLM else f"{prefix}_{ours}"


class Histogram(Collector):
    """A histogram of seconds or tokens.

    That of prometheus-client takes a lock for each observation, which costs as much as all other
    work for a token.
    """

    def __init__(self, name: str, text: str, model: str, bounds: tuple[float, ...]) -> None:
        self.name = name
        self.text = text
        self.model = model
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value; only on the event loop."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def collect(self) -> Iterator[Metric]:
        """The series."""
        names = [*map(str, self.bounds), "+Inf"]
        buckets = list(zip(names, accumulate(self.counts), strict=True))
        family = HistogramMetricFamily(self.name, self.text, labels=["model_name"])
        family.add_metric([self.model], buckets, self.total)
        yield family


class ServerMetrics:
    """The series of a server, in a separate registry."""

    def __init__(self, prefix: str, model: str, service: ServedEngine) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(prefix, model, service))

        def histogram(ours: str, theirs: str, text: str, bounds: tuple[float, ...]) -> Histogram:
            family = Histogram(name_series(prefix, ours, theirs), text, model, bounds)
            self.registry.register(family)
            return family

        self.first_token = histogram(
            "time_to_first_token_seconds",
            "time_to_first_token_seconds",
            "seconds from a request's arrival to its first token",
            FIRST_TOKEN,
        )
        self.token_gap = histogram(
            "inter_token_latency_seconds",
            "inter_token_latency_seconds",
            "seconds between the tokens of a stream",
            BETWEEN_TOKENS,
        )
        self.end_to_end = histogram(
            "request_seconds",
            "e2e_request_latency_seconds",
            "seconds from a request's arrival to its end",
            END_TO_END,
        )
        self.queue = histogram(
            "queue_seconds",
            "request_queue_time_seconds",
            "seconds that a request waited for a row",
            END_TO_END,
        )
        self.prefill = histogram(
            "prefill_seconds",
            "request_prefill_time_seconds",
            "seconds from a request's row to its first token",
            END_TO_END,
        )
        self.decode = histogram(
            "decode_seconds",
            "request_decode_time_seconds",
            "seconds from a request's first token to its end",
            END_TO_END,
        )
        self.prompt_sizes = histogram(
            "request_prompt_tokens",
            "request_prompt_tokens",
            "prompt tokens of an answer",
            TOKENS,
        )
        self.answer_sizes = histogram(
            "request_output_tokens",
            "request_generation_tokens",
            "generated tokens of an answer",
            TOKENS,
        )
        self.longest_answers = histogram(
            "request_longest_output_tokens",
            "request_max_num_generation_tokens",
            "generated tokens of the longest answer to a prompt",
            TOKENS,
        )
        outcome = "outcome" if prefix != VLLM else "finished_reason"
        self.outcomes = Counter(
            name_series(prefix, "requests", "request_success"),
            "answers by how they ended",
            ["model_name", outcome],
            registry=self.registry,
        )
        for reason in OUTCOMES:  # a series that is created by its first event hides that event
            self.outcomes.labels(model, reason)
        self.http = Counter(
            name_series(prefix, "http_responses", "http_responses"),
            "HTTP responses by status",
            ["status"],
            registry=self.registry,
        )
        for status in STATUSES:  # otherwise an alert would miss the first response with this status
            self.http.labels(str(status))
        self.connections = Gauge(
            name_series(prefix, "http_requests_open", "http_requests_open"),
            "HTTP requests that are being answered",
            registry=self.registry,
        )
        self.model = model
        self.observe_token_gap = self.token_gap.observe

    def count_start(self, seconds: float, queued: float) -> None:
        """Count a first token, `seconds` after its request's arrival; it was `queued` before."""
        self.first_token.observe(seconds)
        self.queue.observe(queued)
        self.prefill.observe(max(seconds - queued, 0.0))

    def count_answer(self, num_prompt_tokens: int, num_tokens: int, seconds: float) -> None:
        """Count an answer of `num_tokens`, the last `seconds` after the first."""
        self.prompt_sizes.observe(num_prompt_tokens)
        self.answer_sizes.observe(num_tokens)
        self.decode.observe(seconds)

    def count_prompt(self, num_tokens: int) -> None:
        """Count a prompt with all of its answers, the longest of `num_tokens`."""
        self.longest_answers.observe(num_tokens)

    def count_end(self, outcome: str, seconds: float) -> None:
        """Count an answer that ended, `seconds` after its arrival."""
        self.outcomes.labels(self.model, outcome).inc()
        self.end_to_end.observe(seconds)

    def render(self) -> bytes:
        """The text of `/metrics`."""
        return generate_latest(self.registry)
