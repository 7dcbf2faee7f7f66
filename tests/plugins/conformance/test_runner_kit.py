"""The check of runners: each wrong one fails, and its fault is named; sound ones pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import rerun
from attrs import evolve
from often import often

from headstock import registry
from headstock.spi import DeviceEnv, GraphSupport, LayoutKind, RunnerSpec
from headstock_conformance.case import CaseResult, Outcome, run_case
from headstock_conformance.runner import workloads
from headstock_conformance.runner.checks import LIMITS, drive_beside, list_cases
from headstock_conformance.runner.checks import OWN_DRAFTS as OF_OWN_DRAFTS
from headstock_conformance.runner.drive import Drive
from headstock_conformance.runner.rig import VERIFY_LEN, Setup, Subject, ToyModel, make_windowed

from . import broken_replays, broken_runners

CPU = DeviceEnv(device="cpu")

DECODE = "decode rows, in any number and order"
CHUNKS = "prompts in chunks, steps that sample nothing"
OWN_DRAFTS = "drafts of the model's own layers"
BROKEN = [
    ("StoresNothing", DECODE, "RowTables.keep stores what is sampled, where Step.list_stored"),
    ("StoresNeighbours", DECODE, "another token is stored than was sampled"),
    ("StoresInPrompts", CHUNKS, "that token was known"),
    ("StoresOneDraft", "drafts", "RowTables.keep stores what is sampled, where Step.list_stored"),
    ("SamplesOneEach", "drafts", "Sample.order says where the step's own are"),
    ("RowsSwapped", "whole prompts", "those of all rows are there, in another order"),
    ("RowsCut", "many decode rows, a dozen steps", "tokens: "),
    ("HundredsCut", "hundreds of rows", "tokens: "),
    ("GroupsForgotten", "two KV groups, one with a window", "row 0"),
    ("BusyForever", "a step that raises", "a step runs"),
    ("PromptsFirst", "decode rows beside prompts", "tokens: "),
    ("CountsItself", "rows that sit out steps and change hands", "tokens: "),
    ("DraftsBesideForgotten", "drafts beside prompts and settings", "RowTables.keep stores"),
    ("DraftsForgotten", OWN_DRAFTS, "Sample.make_drafts is missing"),
    ("DraftsOfNeighbours", OWN_DRAFTS, "and eager makes"),
    ("DraftsUnverified", OWN_DRAFTS, "and eager verifies"),
    ("DraftsKept", OWN_DRAFTS, "and eager"),
    ("OutputAsWideAsQueries", "latent KV", "Error"),
    ("RunsTwice", "state KV", "row 0 in layer 1 are off by"),
    ("OrderForgotten", "rows that share leading pages", "of all rows are there, in another order"),
    ("ScoresForgotten", "log-probabilities, of prompts too", "there are no logprobs of row"),
    ("ScoresOfOthers", "log-probabilities, of prompts too", "logprobs of row 0 behind position"),
    ("AllHealthy", "a row of NaN", "healthy: True for row 2"),
    ("GreedyAlone", "temperatures, top-k, top-p, min-p", "without prepare: step 1"),
    ("RepetitionForgotten", "penalties and biases", "tokens: "),
    ("PresenceForgotten", "penalties and biases", "tokens: "),
    ("FrequencyForgotten", "penalties and biases", "tokens: "),
    ("ProcessorsForgotten", "a logits processor", "tokens: "),
    ("MasksForgotten", "masks", "tokens: "),
    ("ChunksPooled", "pooled prompts", "the vector of row 6 is off by"),
    ("TablesWritten", DECODE, "a page table is written"),
    ("KeysCopied", DECODE, "no row of the step has what it computes there"),
    ("WeightsWritten", DECODE, "is written"),
    ("SamplesKept", "memory", "bytes more each time"),
    ("LastProgramAlone", "two runners in turn", "row"),
    ("CallsItReplay", DECODE, "a replay, and nothing is prepared"),
    ("PromisesReplays", "what is prepared", "are replayed, and such a step is not"),
    ("SizesUpwards", "what is prepared", "expected sizes from the largest on"),
    ("AnswersFromPrepare", DECODE, "after prepare: step"),
    ("LengthsStale", DECODE, "after prepare: step 4"),
    ("PlansStale", DECODE, "attention planned on the host: step"),
    ("PreparesWithRow", "what is prepared", "prepare leaves"),
    ("PadsWithRow", DECODE, "row 0"),
    ("DraftsUnordered", "drafts", "Sample.order says where the step's own are"),
    ("ChunksStored", CHUNKS, "that token was known"),
    ("ReplaysGreedy", "temperatures, top-k, top-p, min-p", "after prepare: step 1"),
    ("MasksLate", "masks", "after prepare: step"),
    ("ReplaysOldGroups", "rows that share leading pages", "rows are there, in another order"),
    ("KeepsReplaysAfterErrors", "prepare that is broken off", "and nothing is prepared"),
    ("KeepsOldSizes", "what is prepared", "and nothing is prepared"),
    ("NeverDone", "what is prepared", "sizes for later, and may_defer is False"),
    ("CountsUp", "what is prepared", "prepare_next"),
    ("KeepsGraphs", "memory", "close leaves"),
    ("RunsTwice", "delta rules", "row 1 in layer 1 are off by"),
]
"""Broken runner, the case that shows it, and what that says."""


def spec_of(broken: str) -> RunnerSpec:
    """The spec of a sound runner with a broken implementation."""
    is_replaying = hasattr(broken_replays, broken)
    module = broken_replays if is_replaying else broken_runners
    return evolve(
        find_sound("rerun" if is_replaying else "eager"),
        implementation=f"{module.__name__}:{broken}",
    )


def find_sound(name: str) -> RunnerSpec:
    """The spec of a sound runner; `rerun` is `cudagraph` with graphs that a CPU can make."""
    spec: RunnerSpec = rerun.spec() if name == "rerun" else registry.load_spec("runner", name)
    return spec


def run_cases(spec: RunnerSpec, names: Sequence[str] = ()) -> dict[str, CaseResult]:
    """What came of the cases of these names, or of all."""
    cases = [case for case in list_cases(spec, CPU) if not names or case.name in names]
    return {case.name: run_case(case) for case in cases}


@pytest.mark.feature("R7")
@pytest.mark.parametrize(
    ("broken", "case", "said"),
    [*often(0, BROKEN[1::2]), *often(len(BROKEN), BROKEN[::2])],
    ids=[each[0] for each in (*BROKEN[1::2], *BROKEN[::2])],
)
def test_a_wrong_runner_fails_and_its_fault_is_named(broken: str, case: str, said: str) -> None:
    result = run_cases(spec_of(broken), [case])[case]
    assert result.outcome is Outcome.FAILED
    assert said in result.reason and "\n" not in result.reason


@pytest.mark.feature("R7")
@pytest.mark.parametrize("name", often(1, ["eager", "rerun"]))
def test_a_sound_runner_passes_with_replays_and_without(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    results = run_cases(find_sound(name))
    assert {each.outcome for each in results.values()} == {Outcome.PASSED}, results
    assert results.keys() == {case for _, case, _ in BROKEN}
    assert caplog.text == "", "such as of what could not be captured"


@pytest.mark.feature("R7")
def test_drafts_of_the_models_own_layers_are_replayed() -> None:
    subject = Subject(spec=find_sound("rerun"), env=CPU)
    toy = ToyModel.make(subject, OF_OWN_DRAFTS.make_config())
    with drive_beside(subject, toy, OF_OWN_DRAFTS.setup) as drive:
        drive.prepare(LIMITS)
        OF_OWN_DRAFTS.run(drive)
    assert drive.num_replays >= 6


def test_the_cases_follow_from_the_claims_of_a_runner() -> None:
    spec = rerun.spec()
    narrow = evolve(
        spec.capabilities,
        layouts=frozenset({LayoutKind.FULL}),
        pooling=False,
        drafts=False,
        needs_graph=GraphSupport.UNIFORM,
    )
    cases, fewer = (
        {case.name for case in list_cases(each, CPU)}
        for each in (spec, evolve(spec, capabilities=narrow))
    )
    assert cases - fewer == {"pooled prompts", "latent KV", "state KV", "delta rules", OWN_DRAFTS}
    # Attention that is planned on the host has no such graphs.
    stale = evolve(spec_of("PlansStale"), capabilities=narrow)
    assert run_cases(stale, [DECODE])[DECODE].outcome is Outcome.PASSED


def test_a_runner_of_some_models_alone_cannot_be_compared() -> None:
    spec = rerun.spec()
    spec = evolve(spec, capabilities=evolve(spec.capabilities, models=frozenset({"Mine"})))
    results = run_cases(spec, [DECODE, "memory"])
    assert {each.outcome for each in results.values()} == {Outcome.NOT_HERE}
    assert "it runs Mine alone, and the kit has a decoder of its own" in results[DECODE].reason


def test_a_runner_over_other_operations_is_compared_over_these() -> None:
    spec = registry.load_spec("runner", "eager")
    spec = evolve(spec, capabilities=evolve(spec.capabilities, ops=frozenset({"onednn"})))
    assert run_cases(spec, [DECODE])[DECODE].outcome is Outcome.PASSED


@pytest.mark.parametrize("run", [workloads.everything, workloads.drafts])
def test_rows_get_the_tokens_that_they_would_get_alone(run: Callable[[Drive], None]) -> None:
    subject = Subject(spec=find_sound("eager"), env=CPU)
    toy, setup = ToyModel.make(subject, make_windowed()), Setup(verify_len=VERIFY_LEN)
    with drive_beside(subject, toy, setup) as drive:
        run(drive)
    assert len(drive.rows) > 3
    for row in drive.rows.values():
        with drive_beside(subject, toy, setup) as alone:
            alone.admit(0, row.request)
            while len(alone.rows[0].tokens) < len(row.tokens):
                alone.step(0)
        assert alone.rows[0].tokens == row.tokens
        assert len(row.tokens) > len(row.request.prompt)
