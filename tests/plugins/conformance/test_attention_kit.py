"""The check of attention backends: a right one passes, and a wrong one is named after its fault."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import Any

import pytest
from attrs import evolve
from often import often
from plugins.conformance.plain_attention import BROKEN, Plain, make_spec
from plugins.conformance.sized_attention import SIZED
from torch import Tensor

from headstock.spi import AttentionStep, DeviceEnv, GraphSupport, IntSet, LayerInfo, Planning
from headstock_conformance.attention.checks import list_cases
from headstock_conformance.attention.pairs import cover_pairs
from headstock_conformance.case import CaseResult, Outcome, run_case

LARGE = ("every two claims", "many ", "long rows", " calls")
"""Words of the cases that take longest."""
CPU = DeviceEnv(device="cpu")


def check(backend: type[Plain]) -> Iterator[CaseResult]:
    """What comes of all cases, one by one."""
    cases = list_cases(
        make_spec(backend.__name__), CPU, make_backend=lambda spec, context: backend(context)
    )
    # From the last: those of state are dear to reach otherwise.
    plain = [case for case in cases if not any(word in case.name for word in LARGE)]
    large = [case for case in cases if case not in plain]
    return map(run_case, [*reversed(plain), *large])


def test_a_right_backend_passes_every_case() -> None:
    results = list(check(Plain))
    assert [result for result in results if result.outcome is not Outcome.PASSED] == []
    assert len(results) > 40


@pytest.mark.feature("R7")
@pytest.mark.parametrize("backend", BROKEN, ids=lambda backend: backend.__name__)
def test_a_wrong_backend_fails_and_its_fault_is_named(backend: type[Plain]) -> None:
    reasons = []
    for result in check(backend):
        reasons.append(result.reason)
        if BROKEN[backend] in result.reason:
            break
    assert BROKEN[backend] in reasons[-1], reasons
    assert "\n" not in reasons[-1] and len(reasons[-1]) <= 400


@pytest.mark.feature("R7")
@pytest.mark.parametrize("backend", often(2, SIZED), ids=lambda backend: backend.__name__)
def test_a_backend_that_is_right_for_small_steps_alone_fails(backend: type[Plain]) -> None:
    name, said = SIZED[backend]
    cases = list_cases(
        make_spec(backend.__name__), CPU, make_backend=lambda spec, context: backend(context)
    )
    reasons = (run_case(case).reason for case in cases if name in case.name)
    assert any(said in reason for reason in reasons)


class WideHeadsCut(Plain):
    """Knows the first 256 numbers of a head."""

    def forward(
        self, q: Tensor, layer: LayerInfo, plan: Any, out: Tensor, lse: Tensor | None = None
    ) -> None:
        super().forward(q, layer, plan, out, lse)
        out[..., 256:] = 0


@pytest.mark.feature("R7")
@pytest.mark.parametrize(("most", "outcome"), [(512, Outcome.FAILED), (256, Outcome.PASSED)])
def test_a_backend_that_is_wrong_for_the_widest_heads_that_it_claims_fails(
    most: int, outcome: Outcome
) -> None:
    spec = make_spec("WideHeadsCut")
    claims = evolve(spec.capabilities, head_dims=IntSet.multiples(8, most))
    cases = list_cases(
        evolve(spec, capabilities=claims),
        CPU,
        make_backend=lambda spec, context: WideHeadsCut(context),
    )
    (end,) = [run_case(case) for case in cases if case.name == f"decode: head_dim {most}"]
    assert end.outcome is outcome


class Replayed(Plain):
    """Serves decode steps whose work is captured once."""

    reads = False

    def graph_init(self, buckets: Sequence[int], max_seq_len: int) -> None:
        pass

    def graph_plan(self, bucket: int, step: AttentionStep) -> list[AttentionStep]:
        return [step]

    def graph_update(self, plan: Any, step: AttentionStep) -> None:
        plan[0] = step

    def forward(
        self, q: Tensor, layer: LayerInfo, plan: Any, out: Tensor, lse: Tensor | None = None
    ) -> None:
        out.zero_()
        if self.reads and float(q.abs().max()) == 0.0:
            return
        super().forward(q, layer, plan[0], out, lse)


class ReadingReplayed(Replayed):
    """Looks at the queries first."""

    reads = True


@pytest.mark.feature("R7")
def test_what_a_graph_would_capture_reads_nothing_from_the_device() -> None:
    ends = {}
    for backend in (Replayed, ReadingReplayed):
        spec = make_spec(backend.__name__)
        graph = {"graph": GraphSupport.DECODE, "planning": Planning.PER_STEP}
        spec = evolve(spec, capabilities=evolve(spec.capabilities, **graph))
        cases = list_cases(spec, CPU, make_backend=lambda _, context, made=backend: made(context))
        (case,) = (case for case in cases if case.name == "decode: replays")
        ends[backend] = run_case(case)
    assert ends[Replayed].outcome is Outcome.PASSED, ends[Replayed].reason
    assert ends[ReadingReplayed].outcome is Outcome.FAILED
    assert "it reads the device by Tensor.__float__" in ends[ReadingReplayed].reason


AXES = {"a": [1, 2, 3], "b": [True, False], "c": ["x"], "d": [None, 4, 5, 6]}


def test_every_two_values_of_two_axes_are_in_a_combination() -> None:
    chosen = cover_pairs(AXES)
    assert len(chosen) < 3 * 2 * 4
    for one, other in combinations(AXES, 2):
        wanted = set(product(AXES[one], AXES[other]))
        assert {(each[one], each[other]) for each in chosen} == wanted
