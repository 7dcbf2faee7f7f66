"""What `step_overhead` compares a step with."""

from __future__ import annotations

import torch
from benchmarks.step_overhead import Recording, compare_turns

from headstock_sdpa.backend import SdpaBackend


def test_products_and_whole_calls_of_attention_are_noted_and_can_be_replayed() -> None:
    weight, x = torch.ones(3, 3), torch.ones(2, 3)
    out = torch.zeros(2, 3)
    forward = SdpaBackend.forward
    recording = Recording()

    def attend(*arguments: torch.Tensor) -> None:
        # Products inside attention belong to its call.
        out.add_(arguments[0] @ weight)

    SdpaBackend.forward = attend  # type: ignore[method-assign, assignment]
    try:
        with recording.watch_attention(), recording, torch.inference_mode():
            y = torch.nn.functional.linear(x, weight)
            SdpaBackend.forward(y)  # type: ignore[call-arg, arg-type]
            y.add_(1)
    finally:
        SdpaBackend.forward = forward  # type: ignore[method-assign]
    assert len(recording.calls) == 2
    before = out.clone()
    with torch.inference_mode():
        for call in recording.calls:
            call()
    assert not out.equal(before)


def test_the_ratio_is_the_median_of_the_turns() -> None:
    # One turn in which the machine was busy says nothing, and clocks may differ between turns.
    found = compare_turns([11.0, 24.0, 60.0], [10.0, 20.0, 20.0])
    assert (found["ratio"], found["ratios"]) == (1.2, [1.1, 1.2, 3.0])
