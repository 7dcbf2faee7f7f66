"""The result of a benchmark with its conditions, as JSON and as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from statistics import median
from typing import Any

from attrs import asdict, evolve, field, frozen

from headstock.errors import format_count, shorten
from headstock_bench.latency import collect_percentiles
from headstock_bench.limits import WorkloadLimit
from headstock_bench.turns import EngineTiming, TokenDifference
from headstock_bench.workloads import Workload


@frozen(kw_only=True)
class Conditions:
    """Engine, machine and versions, common to all results of one `headstock bench`.

    commit: None outside a checkout    gpu: None on a CPU
    shape: name of the architecture, or of the model if a checkpoint was loaded
    weights: "checkpoint" or "dummy"
    options: of plugins, in the form of `--opt`, including tuned ones
    batch, batch_tokens: the maximum number of running requests, and of tokens in a step
    settings: the other settings that differ from the default, by name
    graph_tokens: the largest step with prompt tokens for which a graph is planned; 0 for none
    """

    engine: str = "headstock"
    version: str
    commit: str | None
    gpu: str | None
    cpu: str
    threads: int
    torch: str
    python: str
    shape: str
    weights: str
    dtype: str
    attn: str
    cache: str
    scheduler: str
    runner: str
    ops: str
    options: tuple[str, ...] = ()
    batch: int
    batch_tokens: int
    overlap: bool
    page_size: int
    kv_dtype: str
    proposer: str = ""
    settings: Mapping[str, Any] = field(factory=dict)
    graph_tokens: int = 0


@frozen(kw_only=True)
class PeerResult:
    """Another engine that ran the same workload in the same process.

    mode: how it ran    error: why it could not run; the rest is then None
    ratio: headstock's tokens per second divided by this engine's, in the median runs
    ratios: the same of the runs of each round
    latency: percentiles in milliseconds, where requests arrive one by one: the medians of runs
    difference: how its tokens differ from headstock's; None with random weights
    """

    engine: str
    mode: str
    version: str
    error: str | None = None
    runs_s: tuple[float, ...] = ()
    median_s: float | None = None
    out_tok_s: float | None = None
    ratio: float | None = None
    ratios: tuple[float, ...] = ()
    latency: Mapping[str, float] = field(factory=dict)
    difference: TokenDifference | None = None


@frozen(kw_only=True)
class BenchmarkResult:
    """One workload on one engine, with its conditions.

    Times are in seconds; rates are in tokens per second of the median run. Of the last run:
        peak_kv_pages: the maximum number of pages held by requests, over all KV groups
        cached_tokens: prompt tokens that came from the prefix index
        preemptions: times that a request lost its pages and was computed again
        drafts: a line about accepted drafts; empty without a proposer
    limit: the device's minimum time; None if not requested
    """

    conditions: Conditions
    workload: Workload
    date: str = field(factory=lambda: datetime.now(UTC).date().isoformat())
    timing: EngineTiming
    peak_kv_pages: int
    cached_tokens: int
    preemptions: int
    drafts: str = ""
    seed: int
    peers: tuple[PeerResult, ...] = ()
    notes: tuple[str, ...] = ()
    limit: WorkloadLimit | None = None

    @property
    def in_tok_s(self) -> float:
        """Prompt tokens per second."""
        return self.workload.tokens_in / self.timing.median

    @property
    def out_tok_s(self) -> float:
        """Generated tokens per second."""
        if self.timing.latencies:
            # a request that failed has generated only some of its tokens
            num_tokens = median(latency.num_tokens for latency in self.timing.latencies)
            return num_tokens / self.timing.median
        return self.workload.tokens_out / self.timing.median

    @property
    def num_finished(self) -> int:
        """The number of finished requests, in the run with the fewest."""
        return min(
            (latency.finished for latency in self.timing.latencies),
            default=len(self.workload.prompts),
        )

    def list_conditions(self) -> dict[str, Any]:
        """The conditions of the figure by name, and its date."""
        return {**asdict(self.conditions), "date": self.date}

    def to_json(self) -> dict[str, Any]:
        """One flat JSON object: a line of docs/benchmarks."""
        work = self.workload
        return {
            **self.list_conditions(),
            "workload": work.name,
            "requests": len(work.prompts),
            "tokens_in": work.tokens_in,
            "tokens_out": work.tokens_out,
            "lengths": work.length_summary,
            "temperature": work.temperature,
            "seed": self.seed,
            "runs_s": [round(seconds, 4) for seconds in self.timing.seconds],
            "median_s": round(self.timing.median, 4),
            "in_tok_s": round(self.in_tok_s, 1),
            "out_tok_s": round(self.out_tok_s, 1),
            "peak_kv_pages": self.peak_kv_pages,
            "cached_tokens": self.cached_tokens,
            "preemptions": self.preemptions,
            **({"drafts": self.drafts} if self.conditions.proposer else {}),
            **self._latency_to_json(),
            **self._limit_to_json(),
            "notes": list(self.notes),
            **{
                f"ratio_{peer.mode}": peer.ratio
                for peer in self.peers
                if peer.engine != self.conditions.engine
            },
            **({"peers": [asdict(peer) for peer in self.peers]} if self.peers else {}),
        }

    def _latency_to_json(self) -> dict[str, Any]:
        """Fields of latency workloads; empty for others."""
        runs = self.timing.latencies
        if not runs:
            return {}
        percentiles = collect_percentiles(runs)
        return {
            "finished": self.num_finished,
            **{
                name: round(median(values), 3) if values else None
                for name, values in percentiles.items()
            },
            **{
                f"runs_{name}": [round(value, 3) for value in values]
                for name, values in percentiles.items()
            },
        }

    def _limit_to_json(self) -> dict[str, Any]:
        """Fields of the limit; empty if not requested."""
        limit = self.limit
        if limit is None:
            return {}
        return {
            "limit_s": round(limit.seconds, 4),
            "limit_products_s": round(limit.products_s, 4),
            "limit_attention_s": round(limit.attention_s, 4),
            "copy_gb_s": round(limit.rates.bytes_s / 1e9, 1),
            "product_tflop_s": round(limit.rates.flops_s / 1e12, 3),
        }

    def _format_limit(self) -> list[str]:
        """A line about the limit; none if not requested."""
        limit = self.limit
        if limit is None:
            return []
        return [
            f"  limit     {limit.seconds:.3f} s, of which the median is "
            f"{self.timing.median / limit.seconds:.2f} times as long: products "
            f"{limit.products_s:.3f}, attention {limit.attention_s:.3f}, by a copy of "
            f"{limit.rates.bytes_s / 1e9:,.0f} GB/s and products of "
            f"{limit.rates.flops_s / 1e12:,.3g} TFLOP/s"
        ]

    def format_lines(self) -> list[str]:
        """Lines of text."""
        s, work, times = self.conditions, self.workload, self.timing.seconds
        commit = f" ({s.commit})" if s.commit else ""
        counts = (
            f"{format_count(self.cached_tokens, 'cached token')}, "
            f"{format_count(self.preemptions, 'preemption')}"
        )
        return [
            f"{work.name}: {self.out_tok_s:,.1f} output tok/s, {self.in_tok_s:,.1f} input tok/s, "
            f"median {self.timing.median:.3f} s of {format_count(len(times), 'run')} "
            f"({min(times):.3f} to {max(times):.3f})",
            *self._format_latency(),
            *self._format_limit(),
            (
                f"  work      {work.length_summary}, temperature {work.temperature:g}, "
                f"EOS ignored, seed {self.seed}"
            ),
            (
                f"  model     {s.shape}, {s.weights} weights, {s.dtype}, KV {s.kv_dtype}, batch "
                f"up to {s.batch}, steps up to {s.batch_tokens:,} tokens, "
                f"overlap {'on' if s.overlap else 'off'}"
            ),
            (
                f"  plugins   attn {s.attn} | cache {s.cache} | scheduler {s.scheduler} | runner "
                f"{s.runner} | ops {s.ops}{f' | proposer {s.proposer}' if s.proposer else ''}"
            ),
            *([f"  options   {shorten(', '.join(s.options), 160)}"] if s.options else []),
            *([f"  settings  {shorten(dict(s.settings), 160)}"] if s.settings else []),
            *([f"  drafts    {self.drafts or 'none'}"] if s.proposer else []),
            f"  KV pool   pages of {s.page_size}, {self.peak_kv_pages} held at most; {counts}",
            (
                f"  versions  headstock {s.version}{commit}, torch {s.torch}, Python {s.python}, "
                f"{self.date}"
            ),
            f"  machine   {s.gpu or s.cpu}, {format_count(s.threads, 'thread')}",
            *(f"  peer      {format_peer(peer)}" for peer in self.peers),
            *(f"  note      {note}" for note in self.notes),
        ]

    def _format_latency(self) -> list[str]:
        """Lines of latencies; none if all requests are submitted at once."""
        runs = self.timing.latencies
        if not runs:
            return []
        spans = {
            name: _format_span_ms(name.split("_")[1], values)
            for name, values in collect_percentiles(runs).items()
        }
        errors = [latency.error for latency in runs if latency.error is not None]
        return [
            f"  TTFT      {spans['ttft_p50_ms']}, {spans['ttft_p99_ms']}",
            f"  ITL       {spans['itl_p50_ms']}, {spans['itl_p99_ms']}",
            f"  requests  {self.num_finished} of {len(self.workload.prompts)} finished",
            *(f"  failed    {error}" for error in errors[:1]),
        ]


def _format_span_ms(percentile: str, runs: Sequence[float]) -> str:
    """The median of the runs and their range, as text."""
    if not runs:
        return f"{percentile} unknown (no stream has two pieces)"
    return f"{percentile} {median(runs):.2f} ms ({min(runs):.2f} to {max(runs):.2f})"


def format_peer(peer: PeerResult) -> str:
    """A line of text about a peer."""
    name = f"{peer.engine} {peer.version}, {peer.mode}:"
    if peer.error is not None or peer.out_tok_s is None:
        return f"{name} could not run: {peer.error}"
    text = (
        f"{name} {peer.out_tok_s:,.1f} output tok/s, median {peer.median_s:.3f} s, ours is "
        f"{peer.ratio:.2f}x ({min(peer.ratios):.2f} to {max(peer.ratios):.2f})"
    )
    if peer.latency:
        spans = (f"{name} {value:.2f}" for name, value in peer.latency.items())
        text += f"; {', '.join(spans)}"
    if peer.difference is None:
        return text
    first = peer.difference.first
    where = f", the first at output token {first}" if first is not None else ""
    return f"{text}; {format_count(peer.difference.requests, 'request')} with other tokens{where}"


def make_peer_result(
    ours: EngineTiming, theirs: EngineTiming, workload: Workload, difference: TokenDifference | None
) -> PeerResult:
    """A peer's timing compared with headstock's."""
    peer = PeerResult(
        engine=theirs.engine, mode=theirs.mode, version=theirs.version, error=theirs.error
    )
    if theirs.error is not None:
        return peer
    return evolve(
        peer,
        runs_s=tuple(round(seconds, 4) for seconds in theirs.seconds),
        median_s=round(theirs.median, 4),
        out_tok_s=round(workload.tokens_out / theirs.median, 1),
        # Only for runs in one process, which alternate.
        ratio=round(theirs.median / ours.median, 3),
        ratios=tuple(
            round(their / our, 3) for our, their in zip(ours.seconds, theirs.seconds, strict=True)
        ),
        latency={
            name: round(median(values), 3)
            for name, values in collect_percentiles(theirs.latencies).items()
            if values
        }
        if theirs.latencies
        else {},
        difference=difference,
    )
