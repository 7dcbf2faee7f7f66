"""How a decode step of many rows is reached, and what its time is divided by."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from gpu.step_time import end_requests, start_decoding, sum_heads
from gpu.sweep import find_falls, limit_step
from toy_engine import Toys, installed

from headstock_bench.model_shapes import MODEL_SHAPES
from headstock_conformance.scheduler.toy_device import VOCAB


@pytest.fixture
def toys(tmp_path: Path) -> Iterator[Toys]:
    with installed(tmp_path) as toys:
        yield toys


def draw_prompts(count: int, length: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCAB, length).astype(np.int32) for _ in range(count)]


def test_rows_decode_together_for_the_steps_that_are_wanted(toys: Toys) -> None:
    # Eight prompts of 40 tokens take six steps, so the first request answers for as many before the
    # last one's prompt is computed.
    engine = toys.engine()
    ids = start_decoding(engine, draw_prompts(8, 40), steps=3)
    for _ in range(3):
        assert engine.plan is not None and engine.plan.num_decode == 8
        engine.step()
    end_requests(engine, ids)
    assert not engine.has_work
    engine.close()


def test_rows_that_never_decode_together_are_an_error(toys: Toys) -> None:
    engine = toys.engine(num_pages=40)
    with pytest.raises(RuntimeError, match="8 rows of 40 tokens do not decode together"):
        start_decoding(engine, draw_prompts(8, 40), steps=3)
    engine.close()


def test_a_fall_is_by_more_than_a_twentieth_of_the_best_of_fewer_streams() -> None:
    rates = {1: (100.0, 90.0), 8: (400.0, 350.0), 32: (390.0, 340.0), 128: (375.0, 700.0)}
    streams = [
        {"streams": count, "out_tok_s": whole, "streamed_out_tok_s": streamed}
        for count, (whole, streamed) in rates.items()
    ]
    # 390 and 375 are each within a twentieth of the one before; 375 is not within one of 400.
    assert find_falls(streams) == [(128, "out_tok_s")]


def test_the_head_is_the_longest_product_between_attention_and_sampling() -> None:
    step = [
        ("gated_kernel", 90.0),
        ("decode_kernel", 10.0),
        ("gated_kernel", 9.0),
        ("add_norm_kernel", 1.0),
        ("nvjet_a", 80.0),
        ("part_kernel", 5.0),
        ("join_kernel", 2.0),
    ]
    assert sum_heads(step + step) == 160.0


def test_the_limit_is_the_time_to_read_weights_and_keys_and_values() -> None:
    # docs/benchmarks counts 1.19 GB of weights and 114,688 bytes a token.
    shape = MODEL_SHAPES["qwen3-0.6b"]
    alone, more = (
        limit_step(shape, rows, context, 4.27e12) for rows, context in ((1, 0), (256, 1000))
    )
    assert alone == pytest.approx(1.19e9 / 4.27e6, rel=0.01)
    assert more is not None and alone is not None
    assert more - alone == pytest.approx(256_000 * 114_688 / 4.27e6, rel=1e-3)
    assert limit_step(MODEL_SHAPES["qwen3-30b-a3b"], 1, 0, 4.27e12) is None
