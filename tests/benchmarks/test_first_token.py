"""The points that a request passes on the way to its first token."""

from __future__ import annotations

from gpu.first_token import POINTS, main


def test_each_point_comes_after_the_one_before() -> None:
    words = ["--shape", "demo", "--attn", "sdpa", "--device", "cpu"]
    found = main([], [*words, "--lengths", "16,40", "--count", "3"])
    for length in ("16", "40"):
        times = [found[length][point] for point in POINTS]
        assert times == sorted(times) and times[0] > 0
        # On a CPU without overlap a launch is the whole step.
        assert found[length]["all is launched"] > found[length]["the launch begins"]
