"""One engine, and those it is compared with, at one workload after another."""

from __future__ import annotations

from headstock import LLM
from headstock_bench.engine import Ours
from headstock_bench.figure import Figure, peer_of
from headstock_bench.machine import setting
from headstock_bench.timing import Contestant, Difference, Report, Timing, alternate, difference
from headstock_bench.workloads import Workload


class Bench:
    """Measures `llm`, `runs` times a workload after a run that warms up; `shape` is what figures
    call the model.
    """

    def __init__(
        self, llm: LLM, *, version: str, shape: str, runs: int, report: Report | None = None
    ) -> None:
        self.ours = Ours(llm, version)
        self.dummy = llm.config.load_format == "dummy"
        self.setting = setting(
            llm,
            version=version,
            shape=shape,
            weights="dummy" if self.dummy else "checkpoint",
        )
        self.runs = runs
        self.report = report
        self.peers: tuple[Contestant, ...] = ()

    def compare(self) -> None:
        """From now on, transformers does the same work in turns with us."""
        from headstock_bench.peers import Continuous, Generate, load

        engine = self.ours.llm.engine
        model = load(engine.directory, self.setting.dtype, engine.summary.device, dummy=self.dummy)
        self.peers = (Generate(model), Continuous(model))

    def fitted(self, workload: Workload) -> tuple[Workload, tuple[str, ...]]:
        """The workload for this model's vocabulary, and what is to be said of it.

        raises: UsageError
        """
        self.ours.check(workload)
        if self.peers:
            from headstock_bench.peers import check_greedy

            check_greedy(workload)
        vocab = self.ours.llm.engine.model.vocab
        if max(map(max, workload.prompts)) < vocab:
            return workload, ()
        return workload.within(vocab), (f"token ids taken modulo the vocabulary of {vocab}",)

    def figure(self, workload: Workload, notes: tuple[str, ...] = ()) -> Figure:
        """The figure of one workload.   raises: UsageError, EngineDied"""
        timings = alternate([self.ours, *self.peers], workload, self.runs, self.report)
        ours, *found = timings
        return Figure(
            setting=self.setting,
            workload=workload,
            timing=ours,
            peak_kv_pages=self.ours.peak_pages,
            cached_tokens=self.ours.cached_tokens,
            preemptions=self.ours.preemptions,
            seed=workload.seed,
            peers=tuple(
                peer_of(ours, theirs, workload, self.parted(ours, theirs)) for theirs in found
            ),
            notes=notes,
        )

    def parted(self, ours: Timing, theirs: Timing) -> Difference | None:
        """Where the tokens part; None with random weights, which no two engines draw alike."""
        return (
            None
            if self.dummy or theirs.error is not None
            else difference(ours.tokens, theirs.tokens)
        )
