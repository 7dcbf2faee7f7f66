"""The check of attention backends: a right one passes, and a wrong one is named after its fault."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from core.conformance.plain_attention import BROKEN, Plain, make_spec

from headstock.conformance.attention.checks import list_cases
from headstock.conformance.case import CaseResult, Outcome, run_case
from headstock.spi import DeviceEnv

CPU = DeviceEnv(device="cpu")


def check(backend: type[Plain]) -> Iterator[CaseResult]:
    """What comes of all cases, one by one."""
    cases = list_cases(
        make_spec(backend.__name__), CPU, make_backend=lambda spec, context: backend(context)
    )
    # From the last: those of state are dear to reach otherwise.
    return map(run_case, reversed(cases))


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
