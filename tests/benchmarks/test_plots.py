"""What the plots of a sweep show."""

from __future__ import annotations

import pytest
from benchmarks.plots import StepBar, StreamPoint, read_steps, read_streams


def test_a_point_has_both_values_of_one_run_and_points_are_in_order_of_streams() -> None:
    ours = {"streams": 8, "itl_ms": 0.9, "out_tok_s": 9000.0}
    ours |= {"streamed_itl_ms": 1.1, "streamed_out_tok_s": 7000.0}
    peer = {"engine": "vLLM 0.24.0", "itl_ms": 1.7, "out_tok_s": 600.0}
    peers = [peer | {"streams": 8}, peer | {"streams": 1}]
    assert read_streams({"streams": [ours], "peers": peers}) == {
        "headstock, whole answers": [StreamPoint(streams=8, itl_ms=0.9, out_tok_s=9000.0)],
        "headstock, each token to a caller in its process": [
            StreamPoint(streams=8, itl_ms=1.1, out_tok_s=7000.0)
        ],
        "vLLM 0.24.0": [
            StreamPoint(streams=1, itl_ms=1.7, out_tok_s=600.0),
            StreamPoint(streams=8, itl_ms=1.7, out_tok_s=600.0),
        ],
    }


def test_the_parts_of_a_step_sum_up_to_its_time_on_the_device() -> None:
    classes = {"attention": 100, "products": 400, "sampling": 20, "other": 30, "experts": 5}
    step = {"rows": 1, "context": 500, "classes_us": classes, "head_us": 80, "limit_us": 290}
    step |= {"step_us": 560}
    parts = {"attention": 100, "linear": 320, "head": 80, "sampling": 20, "rest": 35}
    bar = StepBar(rows=1, context=500, parts=parts, limit_us=290)
    assert read_steps({"classes": [step]}) == [bar]
    (other,) = read_steps({"classes": [step], "copy_bytes_s": 2.9e12})
    assert (other.copy_bytes_s, bar.copy_bytes_s) == (2.9e12, 4.27e12)
    assert sum(parts.values()) == sum(classes.values())
    with pytest.raises(ValueError, match="1 rows take 555 us of a step of 400: they overlap"):
        read_steps({"classes": [step | {"step_us": 400}]})
