"""The case of steps with prompts behind rows that share pages: who is asked, and what it finds."""

from __future__ import annotations

import pytest
from attrs import evolve
from plugins.conformance.plain_attention import Plain, make_spec
from torch import Tensor

from headstock.spi import (
    AttentionStep,
    DeviceEnv,
    DeviceRange,
    Feature,
    GraphSupport,
    LayerInfo,
    SpiRange,
)
from headstock_conformance.attention.checks import list_cases
from headstock_conformance.case import Case, Outcome, run_case

NAME = "extend: replays beside shared prefixes"


class Captured(Plain):
    """Reads lengths from the step's tensors, as a graph does, and each row by itself."""

    def graph_init(self, buckets: object, max_seq_len: int) -> None:
        """Nothing is held."""

    def capture_plan(self, step: AttentionStep) -> AttentionStep:
        return step

    def forward(
        self,
        q: Tensor,
        layer: LayerInfo,
        plan: AttentionStep,
        out: Tensor,
        lse: Tensor | None = None,
    ) -> None:
        lens, contexts = plan.query_start.diff().numpy(), plan.context_lens.numpy()
        super().forward(
            q, layer, evolve(plan, host_query_lens=lens, host_context_lens=contexts), out, lse
        )


class PrefixesForgotten(Captured):
    """Attends to what follows the prefixes alone."""

    def capture_plan(self, step: AttentionStep) -> AttentionStep:
        return step if step.shared is None else step.shared.rest


def cases_of(backend: type[Captured], *, graph: GraphSupport = GraphSupport.ALWAYS) -> list[Case]:
    """The cases of that name."""
    spec = make_spec(backend.__name__)
    features = spec.capabilities.features | {Feature.SHARED_PREFIX}
    spec = evolve(
        spec,
        spi=SpiRange(0, 3),
        capabilities=evolve(
            spec.capabilities, graph=graph, features=features, devices=(DeviceRange("cuda"),)
        ),
    )
    # On a CPU they stand for kernels, which may read what is on the device.
    env = DeviceEnv(device="cuda", capability=(9, 0))
    cases = list_cases(spec, env, "cpu", lambda spec, context: backend(context))
    return [case for case in cases if case.name == NAME]


@pytest.mark.feature("V5", "R7")
def test_only_backends_that_get_such_steps_are_asked() -> None:
    assert len(cases_of(Captured)) == 1
    assert cases_of(Captured, graph=GraphSupport.UNIFORM) == []


@pytest.mark.feature("V5", "R7")
def test_a_backend_that_ignores_shared_prefixes_is_right() -> None:
    (case,) = cases_of(Captured)
    assert run_case(case).outcome is Outcome.PASSED


@pytest.mark.feature("V5", "R7")
def test_a_backend_that_forgets_shared_prefixes_is_told_so() -> None:
    (case,) = cases_of(PrefixesForgotten)
    result = run_case(case)
    assert result.outcome is Outcome.FAILED and "off by" in result.reason
