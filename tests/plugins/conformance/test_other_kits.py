"""The checks of every kind but attention and processors: each wrong plugin is named."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
from attrs import evolve
from often import often

from headstock import registry
from headstock.spi import DeviceEnv, WeightKind
from headstock_conformance.case import CaseResult, Outcome, run_case
from headstock_conformance.check import CHECKED_KINDS

CPU = DeviceEnv(device="cpu")

BROKEN = [
    ("cache", "radix", "NamespaceIgnored", "the namespace is ignored"),
    ("cache", "radix", "FirstKeysCompared", "the key at 1 is another"),
    ("cache", "radix", "MatchShort", "match_prefix finds 3 of 4 pages that were inserted"),
    ("cache", "radix", "PagesReversed", "match_prefix gives a page of other keys"),
    ("cache", "radix", "HoldsForgotten", "stats: expected"),
    ("cache", "radix", "PagesLost", "a page is lost"),
    ("cache", "radix", "StatsWrong", "stats: expected"),
    ("cache", "radix", "MatchHolds", "held pages, and no row holds one"),
    ("cache", "radix", "EvictAllKeepsOne", "of 400 pages that no row holds, and 1 stay"),
    ("cache", "radix", "LatePagesWrong", "match_prefix gives another page for page 38 of 38"),
    ("cache", "radix", "NamespacesCut", "for 'tenant 51', which others inserted"),
    ("cache", "radix", "NamespacesShort", "the namespace is ignored"),
    ("cache", "radix", "NamespacesFolded", "the namespace is ignored"),
    ("cache", "radix", "KeysNarrow", "and a key of page 1 is another"),
    ("cache", "radix", "PagesNarrow", "match_prefix gives another page for page"),
    ("cache", "radix", "StatesMisplaced", "add_snapshot answers"),
    ("cache", "radix", "StatesReplaced", "add_snapshot answers [7]"),
    ("cache", "radix", "BranchesUnknown", "match_prefix knows 0 of 6 pages"),
    ("ops", "torch", "OwnEps", "norms have an eps of 1e-06, and ModelConfig.norm_eps says 0.3"),
    ("ops", "torch", "KVMisplaced", "keys and values of layer 0 are misplaced"),
    ("ops", "torch", "KVSwapped", "keys lie where values belong"),
    ("ops", "torch", "StartsWritten", "batch.starts is written, but is read-only"),
    ("ops", "torch", "BiasForgotten", "keys of layer 0 are off by"),
    ("ops", "torch", "GreedyAlone", "tokens that torch rates lower"),
    ("ops", "torch", "MaskIgnored", "forbidden tokens are sampled"),
    ("ops", "torch", "ProcessorsIgnored", "tokens that torch rates lower"),
    ("ops", "torch", "BansIgnored", "bans: "),
    ("ops", "torch", "PenaltiesIgnored", "penalties: tokens that torch rates lower"),
    ("ops", "torch", "TargetsIgnored", "targets: "),
    ("ops", "torch", "TopKIgnored", "top_k, 300 rows of 150 tokens: "),
    ("ops", "torch", "TopPIgnored", "top_p, 300 rows of 150 tokens: "),
    ("ops", "torch", "MinPIgnored", "min_p, 300 rows of 150 tokens: "),
    ("ops", "torch", "RepetitionIgnored", "repetition, 300 rows of 150 tokens: "),
    ("ops", "torch", "PresenceIgnored", "presence, 300 rows of 150 tokens: "),
    ("ops", "torch", "FrequencyIgnored", "frequency, 300 rows of 150 tokens: "),
    ("ops", "torch", "BiasIgnored", "bias, 300 rows of 150 tokens: "),
    ("ops", "torch", "OneSeed", "tokens that torch rates lower"),
    ("ops", "torch", "OnePosition", "tokens that torch rates lower"),
    ("ops", "torch", "SampleRowsCut", "first in row 5"),
    ("ops", "torch", "AlternativesCut", "log-probabilities: "),
    ("ops", "torch", "VocabularyCut", "2 rows of 152000 tokens: "),
    ("ops", "torch", "HistoryCut", "repetition, 300 rows of 150 tokens: "),
    ("ops", "torch", "PresenceLiftForgotten", "presence beside a temperature"),
    ("ops", "torch", "FrequencyLiftForgotten", "frequency, 300 rows of 150 tokens: "),
    ("ops", "torch", "RepetitionLiftForgotten", "repetition beside a temperature"),
    ("ops", "torch", "NormWeightsCut", "off by"),
    ("ops", "torch", "NormInputsCut", "off by"),
    ("ops", "torch", "SampleCallsCounted", "call 4"),
    ("ops", "torch", "HeadMinPIgnored", "lm_head_sample with min_p"),
    ("ops", "torch", "LinearTokensCut", "(a step of 2100 tokens)"),
    ("ops", "torch", "TokensRead", "it reads the device by Tensor.__float__"),
    ("ops", "torch", "SequencesCut", "scores of 270 sequences are off by"),
    ("ops", "torch", "LateLayersForgotten", "layer 2"),
    ("ops", "torch", "GateIgnored", "keys of layer 1 are off by"),
    ("ops", "torch", "MemoryForgotten", "scores are off by"),
    ("scheduler", "mixed", "starve", "some request is never run"),
    ("scheduler", "mixed", "alternate", "the same view gives other rows when called again"),
    ("scheduler", "mixed", "overspend", "tokens of 7"),
    ("proposer", "ngram", "RoomIgnored", "drafts for a row with room for 1"),
    ("proposer", "ngram", "AnswerReused", "the next result overwrites the last one"),
    ("proposer", "ngram", "TokensWritten", "read-only"),
    ("tools", "hermes", "MarkCut", "cut at 1 is parsed as CONTENT"),
    ("tools", "hermes", "TextStripped", "has no call, but is parsed as"),
    ("tools", "hermes", "EndTwice", "END outside of a call"),
    ("tools", "hermes", "EndLost", "a call has no END"),
    ("tools", "hermes", "TailLost", "has no call, but is parsed as"),
    ("tools", "hermes", "HoldsAll", "characters of text that begins no call are held back"),
    ("tools", "hermes", "HoldsText", "characters of text that begins no call are held back"),
    ("tools", "hermes", "HoldsLateText", "characters of text that begins no call are held back"),
    ("tools", "hermes", "HoldsCalls", "is held back when the next one has begun"),
    ("tools", "hermes", "EndInvented", "is cut off, but ends the call f with"),
    ("tools", "hermes", "WritesOthersCalls", "which is parsed as CONTENT"),
    ("tools", "hermes", "MarksMissed", "and is parsed as CALL"),
    ("tools", "hermes", "TextInvented", "has the arguments"),
    ("tools", "hermes", "TextAfterCallsLost", "and the content is"),
    ("tools", "hermes", "BracketsLost", "and the content is"),
    ("tools", "hermes", "ArgumentsBroken", "expected a JSON object"),
    ("grammar", "llguidance", "MasksMissBit", "and the mask does not allow it"),
    ("grammar", "llguidance", "MasksAllowAll", "and advance does not"),
    ("grammar", "llguidance", "RollsBackShort", "rollback(2) leaves a different mask"),
    ("grammar", "llguidance", "EndsAnywhere", "does not match the grammar, but is allowed"),
    ("grammar", "llguidance", "MovesMatchers", "fill_masks moves a matcher on"),
    ("grammar", "llguidance", "OneMatcher", "two matchers of one grammar disturb each other"),
    ("grammar", "llguidance", "TakesAnything", "which is not valid json"),
    ("grammar", "llguidance", "RulesDropped", "'uniqueItems', and masks allow"),
    ("proposer", "ngram", "BeyondVocabulary", "1000"),
    ("model", "Qwen3ForCausalLM", "EOS_DROPPED", "eos_ids is () for an eos_token_id of 7"),
    ("model", "Qwen3ForCausalLM", "SECOND_EOS_DROPPED", "eos_token_id of [3, 9, 11]"),
    ("model", "Qwen3ForCausalLM", "POSITIONS_CUT", "max_position is 1000"),
    ("model", "Qwen3ForCausalLM", "NORMS_WIDE", "weights after they round"),
    ("model", "Olmo2ForCausalLM", "NORMS_NARROW", "weights before they round"),
    ("model", "Qwen3ForCausalLM", "EPS_IGNORED", "log-probabilities are off by"),
    ("model", "Qwen3ForCausalLM", "ROPE_IGNORED", "log-probabilities are off by"),
]
WHERE = {
    "PagesReversed": "one full group: pages in order",
    "HoldsForgotten": "one full group: rows in any order",
    "PagesLost": "one full group: evicted pages",
    "StatsWrong": "one full group: evicted pages",
    "NamespacesCut": "one full group: hundreds of paths",
    "MatchHolds": "one full group: hundreds of calls",
    "EvictAllKeepsOne": "one full group: hundreds of pages",
    "LatePagesWrong": "one full group: hundreds of pages",
    **dict.fromkeys(
        ("StatesMisplaced", "StatesReplaced", "BranchesUnknown"),
        "a full group and a state: snapshots",
    ),
    "MaskIgnored": "sampling: mask",
    "ProcessorsIgnored": "sampling: processors",
    "BansIgnored": "sampling: bans, biases, penalties",
    "PenaltiesIgnored": "sampling: bans, biases, penalties",
    "TargetsIgnored": "sampling: bans, biases, penalties",
    "LinearTokensCut": "many tokens",
    "TokensRead": "the device is not read",
    "SequencesCut": "many sequences",
    "NormWeightsCut": "large weights of norms",
    "NormInputsCut": "large weights of norms",
    "AlternativesCut": "sampling: each setting, 67 rows of 600 tokens",
    "VocabularyCut": "sampling: each setting, 2 rows of 152000 tokens",
    "LateLayersForgotten": "many layers",
    "HeadMinPIgnored": "sampling: scores and samples in one call",
    "SampleCallsCounted": "sampling: 600 calls",
    **dict.fromkeys(
        (
            "TopKIgnored",
            "TopPIgnored",
            "MinPIgnored",
            "RepetitionIgnored",
            "PresenceIgnored",
            "FrequencyIgnored",
            "BiasIgnored",
            "HistoryCut",
            "PresenceLiftForgotten",
            "FrequencyLiftForgotten",
            "RepetitionLiftForgotten",
            "OneSeed",
            "OnePosition",
            "SampleRowsCut",
        ),
        "sampling: each setting, 300 rows of 150 tokens",
    ),
    "RulesDropped": "a schema's rules, or a refusal",
    "TakesAnything": "texts that are not a grammar",
    "EOS_DROPPED": "tokens that end a text",
    "SECOND_EOS_DROPPED": "tokens that end a text",
    "POSITIONS_CUT": "positions and the vocabulary",
    "NORMS_WIDE": "where norms round",
    "NORMS_NARROW": "where norms round",
    "EPS_IGNORED": "a large eps of norms",
    "GateIgnored": "attention times a gate",
    "MemoryForgotten": "delta rules, in chunks",
    "ROPE_IGNORED": "another rope",
}
"""Broken plugin -> the case that shows it."""


MODULES = {
    "tools": "broken_answers",
    "grammar": "broken_answers",
    "ops": "broken_ops",
    "model": "broken_models",
}
"""Kind -> the module of its broken plugins, where it is not `broken_parts`."""


def spec_of(kind: str, sound: str, broken: str) -> Any:
    """The spec of a sound plugin with a broken implementation."""
    spec = registry.load_spec(kind, sound)
    module = MODULES.get(kind, "broken_parts")
    return evolve(spec, implementation=f"plugins.conformance.{module}:{broken}")


def check_bits(broken: str, loss: float) -> set[Outcome]:
    """How models end whose weights have few bits."""
    spec = spec_of("ops", "torch", broken)
    spec = evolve(spec, capabilities=evolve(spec.capabilities, weight_loss=loss))
    cases = import_module(CHECKED_KINDS["ops"]).list_cases(spec, CPU)
    names = ("a plain decoder", "biases", "bfloat16", "latent KV, in chunks")
    return {run_case(case).outcome for case in cases if case.name in names}


@pytest.mark.feature("R7")
def test_lossy_weights_are_checked_against_the_loss_that_is_declared() -> None:
    assert check_bits("FewBits", 0.05) == {Outcome.PASSED}
    assert check_bits("FewBits", 0.0) == {Outcome.FAILED}
    assert check_bits("TwoBits", 0.05) == {Outcome.FAILED}


@pytest.mark.feature("R7")
def test_numbers_that_a_set_claims_to_multiply_by_are_checked() -> None:
    def find_reason(broken: str) -> str:
        """Why the case of maps in FP8 fails."""
        spec = spec_of("ops", "torch", broken)
        formats = frozenset({WeightKind.FP8_E4M3})
        spec = evolve(spec, capabilities=evolve(spec.capabilities, formats=formats))
        cases = import_module(CHECKED_KINDS["ops"]).list_cases(spec, CPU)
        (case,) = [case for case in cases if case.name == "maps in fp8_e4m3"]
        return run_case(case).reason

    assert "takes_format takes no map in it" in find_reason("StartsWritten")
    assert "keys of layer 0 are off by" in find_reason("ScalesTurned")


@pytest.mark.feature("R7")
def test_operations_learn_what_they_will_compute_as_in_an_engine() -> None:
    for broken in ("Configured", "ExpertsRefused"):
        cases = import_module(CHECKED_KINDS["ops"]).list_cases(spec_of("ops", "torch", broken), CPU)
        chosen = [case for case in cases if "experts" in case.name or "sampling" in case.name]
        ends = {case.name: run_case(case) for case in chosen}
        refused = {name for name, end in ends.items() if end.outcome is Outcome.NOT_HERE}
        assert {end.outcome for end in ends.values()} <= {Outcome.PASSED, Outcome.NOT_HERE}
        assert all(("experts" in name) == (name in refused) for name in ends) or not refused
        assert bool(refused) == (broken == "ExpertsRefused")


@pytest.mark.feature("R7")
@pytest.mark.parametrize(
    ("kind", "sound", "broken", "said"),
    [*often(0, BROKEN[1::2]), *often(len(BROKEN), BROKEN[::2])],
    ids=[f"{each[0]}-{each[2]}" for each in (*BROKEN[1::2], *BROKEN[::2])],
)
def test_a_wrong_plugin_fails_and_its_fault_is_named(
    kind: str, sound: str, broken: str, said: str
) -> None:
    cases = import_module(CHECKED_KINDS[kind]).list_cases(spec_of(kind, sound, broken), CPU)
    reasons = {}
    for case in cases:
        if WHERE.get(broken, case.name) != case.name:
            continue
        result = run_case(case)
        if result.outcome is Outcome.FAILED:
            reasons[result.case] = result.reason
        if said in result.reason:
            break
    assert said in result.reason, reasons
    assert "\n" not in result.reason


def check_lone(family: str) -> dict[str, CaseResult]:
    """What comes of a family of an architecture that transformers lacks."""
    spec = evolve(spec_of("model", "Qwen3ForCausalLM", family), name="MineForCausalLM")
    cases = import_module(CHECKED_KINDS["model"]).list_cases(spec, CPU)
    return {case.name: run_case(case) for case in cases}


@pytest.mark.feature("R7")
def test_a_family_that_transformers_lacks_is_compared_with_itself_and_that_is_said() -> None:
    first, *others = check_lone("MINE").values()
    assert first.outcome is Outcome.NOT_HERE
    assert "has no MineForCausalLM: the family is compared with itself alone" in first.reason
    assert {result.outcome for result in others} == {Outcome.PASSED} and len(others) == 5


@pytest.mark.feature("R7")
@pytest.mark.parametrize(
    ("family", "case"),
    [
        ("CHUNKS_COUNTED", "in chunks, beside itself"),
        ("ROWS_CUT", "many sequences in a step"),
        ("NO_END", "tokens that end a text"),
        ("SHORT", "positions and the vocabulary"),
    ],
)
def test_a_wrong_family_differs_from_itself(family: str, case: str) -> None:
    failed = [name for name, each in check_lone(family).items() if each.outcome is Outcome.FAILED]
    assert any(case in name for name in failed)


@pytest.mark.feature("R7")
def test_proposers_are_asked_about_the_vocabulary_of_the_check() -> None:
    spec = evolve(
        registry.load_spec("proposer", "ngram"),
        resolve="plugins.conformance.broken_parts:refuse_small",
    )
    results = [
        run_case(case) for case in import_module(CHECKED_KINDS["proposer"]).list_cases(spec, CPU)
    ]
    assert {result.outcome for result in results} == {Outcome.NOT_HERE}
    assert "its drafts need 2000 ids, 1000 are" in results[0].reason
