"""The float32 reference of `--debug-attention`, beside attention in float64."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

from headstock.debug import attention_reference
from headstock.debug.attention_reference import find_deviation
from headstock.spi import LayerInfo, Phase
from headstock_conformance.attention.cases import (
    AttentionCase,
    add_sinks,
    describe_pool,
    in_8_bits,
    in_second_group,
    make,
    make_latent,
    out_dim_of,
)
from headstock_conformance.attention.reference import expected

LENS = {
    Phase.PREFILL: [(5, 5), (1, 1), (33, 33)],
    Phase.EXTEND: [(4, 21), (9, 9), (1, 40)],
    Phase.DECODE: [(1, 21), (1, 1), (1, 33)],
}
LAYER = LayerInfo(index=0, group=0, scale=0.3)
LAYERS = {
    "plain": LAYER,
    "window": evolve(LAYER, window=7),
    "cap": evolve(LAYER, softcap=2.0),
    "both": evolve(LAYER, window=1, softcap=0.5),
    "sinks": add_sinks(evolve(LAYER, window=7), 4, "cpu"),
}


def deviation(case: AttentionCase, layer: LayerInfo, answer: torch.Tensor) -> tuple[object, float]:
    """What the reference finds of an answer."""
    _, kv = describe_pool(case)
    layer = evolve(layer, out_dim=out_dim_of(case))
    return find_deviation(case.q, answer.to(case.q.dtype), case.step, layer, kv)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("phase", Phase)
def test_the_right_answer_is_found_right_and_a_small_change_of_one_row_wrong(
    phase: Phase, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Queries of a prompt are compared in several parts.
    monkeypatch.setattr(attention_reference, "MAX_SCORES", 400)
    case = make(phase, LENS[phase], page_size=8, tail=3.0)
    answer, _ = expected(case, LAYERS[name])
    found, largest = deviation(case, LAYERS[name], answer)
    assert found is None
    assert largest < 2e-5

    wrong = answer.clone()
    last = len(wrong) - 1
    wrong[last, 2, 5] += 0.01
    found, _ = deviation(case, LAYERS[name], wrong)
    assert isinstance(found, attention_reference.Deviation)
    assert (found.row, found.head) == (2, 2)
    assert abs(found.error - 0.01) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_may_be_off_by_their_rounding(dtype: torch.dtype) -> None:
    case = make(Phase.EXTEND, LENS[Phase.EXTEND], dtype=dtype)
    assert deviation(case, LAYER, expected(case, LAYER)[0])[0] is None


def test_latent_vectors_8_bits_and_a_second_group_are_read_as_they_lie() -> None:
    case = make(Phase.DECODE, LENS[Phase.DECODE], kv_heads=1)
    latent = make_latent(case, rope_dim=32)
    assert deviation(latent, LAYER, expected(latent, LAYER)[0])[0] is None
    narrow = in_8_bits(case, 0.5, 2.0)
    scaled = evolve(LAYER, k_scale=0.5, v_scale=2.0)
    assert deviation(narrow, scaled, expected(narrow, LAYER)[0])[0] is None
    other = in_second_group(case)
    assert deviation(other, evolve(LAYER, group=1), expected(case, LAYER)[0])[0] is None


def test_an_answer_of_nan_is_wrong_and_a_row_whose_pages_hold_nan_is_left_out() -> None:
    case = make(Phase.DECODE, LENS[Phase.DECODE])
    answer, _ = expected(case, LAYER)
    answer[1] = torch.nan
    found, _ = deviation(case, LAYER, answer)
    assert isinstance(found, attention_reference.Deviation)
    assert found.row == 1

    page = int(case.step.page_tables[0][1, 0])
    case.pool[page] = torch.nan
    assert deviation(case, LAYER, answer)[0] is None
