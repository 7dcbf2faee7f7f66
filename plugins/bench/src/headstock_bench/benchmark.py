"""The benchmark of one engine and of its competitors."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from headstock import LLM
from headstock.spi import ModelConfig
from headstock_bench.conditions import read_conditions
from headstock_bench.headstock_engine import HeadstockEngine
from headstock_bench.latency_workloads import LatencyWorkload
from headstock_bench.limits import (
    DeviceRates,
    WorkloadLimit,
    count_work,
    limit_workload,
    measure_rates,
)
from headstock_bench.profile import WorkloadProfile, profile_workload
from headstock_bench.result import BenchmarkResult, make_peer_result
from headstock_bench.turns import (
    BenchmarkEngine,
    EngineTiming,
    RunCallback,
    TokenDifference,
    find_difference,
    run_in_turns,
)
from headstock_bench.workloads import Workload


class Benchmark:
    """Measures workloads on `llm`: one warm-up run, then `runs` timed ones.

    shape: the model's name in results    on_run: called after each timed run
    """

    def __init__(
        self, llm: LLM, *, version: str, shape: str, runs: int, on_run: RunCallback | None = None
    ) -> None:
        self.ours = HeadstockEngine(llm, version)
        self.dummy = self.ours.session.config.load_format == "dummy"
        self.conditions = read_conditions(
            llm,
            version=version,
            shape=shape,
            weights="dummy" if self.dummy else "checkpoint",
        )
        self.runs = runs
        self.on_run = on_run
        self.peers: tuple[BenchmarkEngine, ...] = ()
        self.has_greedy_peers = False
        self.rates: DeviceRates | None = None

    @property
    def model(self) -> ModelConfig:
        """The model's configuration."""
        model = self.ours.session.engine.model
        assert isinstance(model, ModelConfig), "the engine is in this process"
        return model

    def add_limits(self) -> None:
        """Add the minimum time of the device to results.

        raises: UsageError for a model with layers that are not modelled
        """
        count_work(self.model)
        device = self.ours.session.engine.summary.device
        self.rates = measure_rates(device, getattr(torch, self.conditions.dtype))

    def add_transformers(self) -> None:
        """Make transformers run each workload too, alternating with headstock."""
        # Imported here: transformers takes 0.7 s to import, and few benchmarks compare.
        from headstock_bench.transformers_engines import (
            TransformersContinuous,
            TransformersGenerate,
            load_model,
        )

        engine = self.ours.session.engine
        model = load_model(
            engine.directory, self.conditions.dtype, engine.summary.device, dummy=self.dummy
        )
        self.peers += (TransformersGenerate(model), TransformersContinuous(model))
        self.has_greedy_peers = True

    def add_settings(self, rivals: Mapping[str, LLM]) -> None:
        """Make engines of other settings run each workload too, by what names these."""
        version = self.conditions.version
        self.peers += tuple(HeadstockEngine(llm, version, name) for name, llm in rivals.items())

    def fit_workload(self, workload: Workload) -> tuple[Workload, tuple[str, ...]]:
        """The workload with ids of this model's vocabulary, and notes for its result.

        raises: UsageError when the workload is too long, or is sampled and has peers
        """
        for engine in (self.ours, *self.peers):
            if isinstance(engine, HeadstockEngine):
                engine.check_length(workload)
        if self.has_greedy_peers:
            from headstock_bench.transformers_engines import check_greedy

            check_greedy(workload)
        vocab = self.ours.session.engine.model.vocab
        if max(map(max, workload.prompts)) < vocab:
            return workload, ()
        return workload.fit_vocab(vocab), (f"token ids taken modulo the vocabulary of {vocab}",)

    def measure(self, workload: Workload, notes: tuple[str, ...] = ()) -> BenchmarkResult:
        """Run one workload, engines alternating.   raises: UsageError, EngineDied"""
        # In one process: runs on two hosts, an hour apart, differ by 20 % and more.
        timings = run_in_turns([self.ours, *self.peers], workload, self.runs, self.on_run)
        ours, *others = timings
        return BenchmarkResult(
            conditions=self.conditions,
            workload=workload,
            timing=ours,
            peak_kv_pages=self.ours.peak_pages,
            cached_tokens=self.ours.cached_tokens,
            # Otherwise a pool that is too small would only show as a low figure.
            preemptions=self.ours.preemptions,
            drafts=self.ours.drafts,
            seed=workload.seed,
            peers=tuple(
                make_peer_result(ours, theirs, workload, self._compare_tokens(ours, theirs))
                for theirs in others
            ),
            notes=notes,
            limit=self._limit(workload),
        )

    def _limit(self, workload: Workload) -> WorkloadLimit | None:
        """The minimum time of the device, if requested.

        It is known for requests that all run at once.
        """
        engine = self.ours.session.engine
        if self.rates is None or isinstance(workload, LatencyWorkload):
            return None
        if len(workload.prompts) > engine.summary.max_running_requests:
            return None
        return limit_workload(
            self.model,
            workload,
            self.rates,
            weight_bytes=getattr(torch, self.conditions.dtype).itemsize,
            kv_bytes=getattr(torch, self.conditions.kv_dtype).itemsize,
        )

    def profile(self, workload: Workload) -> WorkloadProfile:
        """One more run of a workload, under torch's profiler.   raises: UsageError, EngineDied"""
        engine = self.ours.session.engine
        return profile_workload(
            workload.name,
            lambda: self.ours.run(workload).seconds,
            lambda: engine.stats().executed_steps,
            on_gpu=engine.summary.device == "cuda",
        )

    def _compare_tokens(self, ours: EngineTiming, theirs: EngineTiming) -> TokenDifference | None:
        """The difference of tokens; None with random weights, which differ between engines."""
        return (
            None
            if (self.dummy and theirs.engine != self.ours.engine) or theirs.error is not None
            else find_difference(ours.tokens, theirs.tokens)
        )
