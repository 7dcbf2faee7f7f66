"""What the host takes of a step of streams."""

from __future__ import annotations

import sys

import pytest
from gpu.stream_host import main


@pytest.mark.long
@pytest.mark.full
def test_parts_of_a_step_are_told_apart() -> None:
    interval = sys.getswitchinterval()
    words = ["--shape", "demo", "--attn", "sdpa", "--device", "cpu", "--num-pages", "200"]
    found = main([], [*words, "--streams", "2,3", "--intervals", "5", "--turns", "1"])
    assert sys.getswitchinterval() == interval
    for streams in (2, 3):
        parts = found["us_a_step"][f"{streams} streams, 5 ms"]
        assert parts["wall"] > 0 and parts["callers"] > 0
        # On a CPU the engine's thread computes the step itself.
        assert 0 < parts["engine"] < 1.1 * parts["wall"]
        assert abs(parts["out_tok_s"] * parts["wall"] / 1e6 - streams) < 0.01


def test_a_device_that_sleeps_is_waited_for() -> None:
    words = ["--shape", "demo", "--attn", "sdpa", "--device", "cpu", "--num-pages", "200"]
    found = main([], [*words, "--streams", "2", "--intervals", "5", "--turns", "1", "--sleep", "9"])
    parts = found["us_a_step"]["2 streams, 5 ms"]
    # Readings may come a little late, which is little of 127 steps.
    assert parts["wall"] > 0.95 * 9000 and parts["waited"] > 0.5 * parts["wall"]
