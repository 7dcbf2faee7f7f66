"""A step that fails before the tables know of it: who is not in it keeps their pages and their
tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from often import often
from toy_engine import EngineHarness, Toys, request

from headstock.execution.buffers import Buffers
from headstock.execution.sampling_inputs import SamplingTable

RNG = np.random.default_rng(3)
PROMPT = RNG.integers(0, 50, 8)
OTHER = RNG.integers(0, 50, 6)
LATER = [RNG.integers(0, 50, 17) for _ in range(30)]


@pytest.fixture(params=["settings", "pages"])
def failing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What fails, once, when a request with four tokens to come is admitted."""
    pending = [True]
    write_row, apply_plan = SamplingTable.write_row, Buffers.apply_plan

    def failing_row(self: SamplingTable, row: int, one: Any) -> None:
        if one.max_tokens == 4 and pending:
            pending.clear()
            raise RuntimeError("pinned memory is short")
        write_row(self, row, one)

    def failing_plan(self: Buffers, plan: Any, new_rows: dict[int, Any]) -> None:
        if any(np.array_equal(tokens, OTHER) for tokens in new_rows.values()) and pending:
            pending.clear()
            raise RuntimeError("pinned memory is short")
        apply_plan(self, plan, new_rows)

    if request.param == "settings":
        monkeypatch.setattr(SamplingTable, "write_row", failing_row)
    else:
        monkeypatch.setattr(Buffers, "apply_plan", failing_plan)
    return str(request.param)


@pytest.mark.parametrize("at", often(1, [6, 9, 12, 8, 10]))
@pytest.mark.parametrize(
    ("scheduler", "overlap"),
    often(1, [("equal-length", True), ("prefill-first", False), ("equal-length", False)]),
)
def test_who_is_not_in_the_step_keeps_pages_and_tokens(
    toys: Toys, scheduler: str, overlap: bool, at: int, failing: str
) -> None:
    harness = EngineHarness(toys.engine(scheduler=scheduler, overlap=overlap, num_pages=45))
    for name in "ab":
        harness.submit(request(name, PROMPT, 60))
    for step in range(400):
        if step == at:
            harness.submit(request("fails", OTHER, 4))
        if at < step < at + 60 and step % 2 == 0:
            harness.submit(request(f"later {step}", LATER[(step - at) // 2], 6))
        if step > at and not harness.engine.has_work:
            break
        harness.step()  # checks each request as it ends
    harness.engine.close()

    reasons = dict(harness.reasons)
    assert reasons.pop("fails") == "error"
    assert len(reasons) > 30
    assert set(reasons.values()) == {"length"}, "a request failed that nothing was wrong with"
