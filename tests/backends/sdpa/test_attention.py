"""The sdpa backend against attention written out in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from headstock.spi import LayerInfo, Phase
from headstock_conformance import attention as cases
from headstock_conformance.attention import TOLERANCE, AttentionCase
from headstock_conformance.attention import shared_prefix_cases as shared_cases
from headstock_sdpa.backend import SdpaBackend
from headstock_sdpa.options import SdpaOptions

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
LAYER = LayerInfo(index=0, group=0, scale=0.25)


def make(phase: Phase, rows: list[tuple[int, int]], **shape: Any) -> AttentionCase:
    return cases.make(phase, rows, **({"head_dim": 16} | shape))


def backend(case: AttentionCase, layers: int = 1) -> SdpaBackend:
    return SdpaBackend(cases.context_of(case, SdpaOptions(), layers))


def check(case: AttentionCase, layer: LayerInfo = LAYER, with_lse: bool = False) -> None:
    cases.check(backend(case), case, layer, with_lse=with_lse)


@st.composite
def row_lengths(draw: st.DrawFn, phase: Phase, page_size: int) -> list[tuple[int, int]]:
    """One to five rows whose contexts end around a page's end."""
    rows = []
    for _ in range(draw(st.integers(1, 5))):
        near = page_size * draw(st.integers(0, 3)) + draw(st.integers(-1, 1))
        context = min(max(near, 1), 150)
        queries = {Phase.PREFILL: context, Phase.DECODE: 1}.get(phase) or draw(
            st.integers(1, context)
        )
        rows.append((queries, context))
    return rows


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("page_size", [1, 3, 16, 128])
@pytest.mark.parametrize("phase", list(Phase), ids=lambda phase: phase.value)
@given(data=st.data())
@settings(max_examples=20)
def test_every_shape_agrees_with_attention_written_out(
    phase: Phase, page_size: int, dtype: torch.dtype, device: str, data: st.DataObject
) -> None:
    def one(name: str, *values: Any) -> Any:
        return data.draw(st.sampled_from(values), name)

    head_dim, kv_heads = one("head_dim", 1, 5, 16, 80, 128), one("kv_heads", 1, 2, 3)
    case = make(
        phase,
        data.draw(row_lengths(phase, page_size), "rows"),
        page_size=page_size,
        heads=kv_heads * one("ratio", 1, 2, 7),
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=device,
        seed=data.draw(st.integers(0, 99), "seed"),
    )
    layer = evolve(
        LAYER,
        scale=head_dim**-0.5,
        window=one("window", None, 1, 2, 16, 100),
        softcap=one("softcap", 0.0, 0.0, 0.7),
    )
    if one("sinks", False, True):
        layer = cases.add_sinks(layer, case.q.shape[1], case.q.device)
    check(case, layer, with_lse=data.draw(st.booleans(), "lse"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("phase", list(Phase), ids=lambda phase: phase.value)
def test_8_bit_keys_and_values_are_scaled_by_layer(
    phase: Phase, dtype: torch.dtype, device: str
) -> None:
    rows = {Phase.DECODE: [(1, 40), (1, 5)], Phase.EXTEND: [(3, 40), (1, 7)]}
    case = make(phase, rows.get(phase, [(20, 20), (2, 2)]), dtype=dtype, device=device)
    narrow = cases.in_8_bits(case, 0.5, 2.0)
    for more in ({}, {"window": 6, "softcap": 2.0}):
        layer = cases.add_sinks(evolve(LAYER, k_scale=0.5, v_scale=2.0, **more), 4, device)
        for scaled in (layer, evolve(layer, sinks=None)):
            out, _ = cases.attend(backend(narrow), narrow, scaled)
            plain = evolve(scaled, k_scale=1.0, v_scale=1.0)
            cases.compare(out, cases.expected(narrow, plain)[0], 2 * TOLERANCE[dtype])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_decode_rows_of_very_different_lengths_keep_their_places(
    dtype: torch.dtype, window: int | None, softcap: float, device: str
) -> None:
    lengths = [5, 900, 17, 850, *range(1, 30), 400, 390, 2]
    case = make(
        Phase.DECODE, [(1, length) for length in lengths], kv_heads=1, dtype=dtype, device=device
    )
    check(case, evolve(LAYER, window=window, softcap=softcap), with_lse=dtype.itemsize == 4)


@pytest.mark.parametrize("window", [None, 40, 256, 300])
@pytest.mark.parametrize("rows", [[(600, 600)], [(520, 700), (1, 3), (300, 300)]])
def test_rows_longer_than_a_block_of_queries(
    rows: list[tuple[int, int]], window: int | None
) -> None:
    check(make(Phase.EXTEND, rows, heads=2, kv_heads=1, head_dim=8), evolve(LAYER, window=window))


@pytest.mark.parametrize("phase", [Phase.EXTEND, Phase.DECODE], ids=lambda phase: phase.value)
def test_pages_behind_the_window_are_never_read(phase: Phase) -> None:
    case = make(phase, [(1, 60), (1, 33), (1, 16)], page_size=4)
    layer = evolve(LAYER, window=9)
    before, _ = cases.attend(backend(case), case, layer)
    table = case.step.page_tables[0]
    for row, context in enumerate((60, 33, 16)):
        behind = (context - 9) // 4
        case.pool[table[row, :behind].long()] = math.nan
        table[row, :behind] = 0
    case.pool[0] = 0.0
    after, _ = cases.attend(backend(case), case, layer)
    assert torch.equal(before, after)


@pytest.mark.parametrize("phase", list(Phase), ids=lambda phase: phase.value)
def test_a_region_is_one_large_page(phase: Phase) -> None:
    rows = [(1 if phase is Phase.DECODE else 7, 7), (1 if phase is Phase.DECODE else 90, 90)]
    case = make(phase, rows, page_size=512)
    assert case.step.page_tables[0].count_nonzero() == len(rows)
    check(case)


def test_plans_interleave_and_serve_several_layers() -> None:
    extend = make(Phase.EXTEND, [(5, 20), (3, 3)])
    step = evolve(
        extend.step,
        phase=Phase.DECODE,
        query_start=torch.arange(3, dtype=torch.int32),
        host_query_lens=np.ones(2, np.int32),
    )
    made = (extend, evolve(extend, step=step, q=extend.q[:2]))
    context = cases.context_of(extend, SdpaOptions(), 2)
    one = SdpaBackend(evolve(context, pools={0: extend.pool, 1: extend.pool.flip(3)}))
    plans = [one.plan(each.step) for each in made]
    for index in (0, 1):
        layer = evolve(LAYER, index=index)
        for plan, each in zip(plans, made, strict=True):
            out = torch.empty_like(each.q)
            one.forward(each.q, layer, plan, out)
            keys, values = (
                tuple(side.flip(1) if index else side for side in sides)
                for sides in (each.keys, each.values)
            )
            cases.compare(out, cases.expected(evolve(each, keys=keys, values=values), layer)[0])


def test_a_layer_reads_the_page_table_of_its_group() -> None:
    case = cases.in_second_group(make(Phase.DECODE, [(1, 20), (1, 9)]))
    one = backend(case)
    plan, out = one.plan(case.step), torch.empty_like(case.q)
    for group in (0, 1):
        one.forward(case.q, evolve(LAYER, group=group), plan, out)
    cases.compare(out, cases.expected(case, LAYER)[0])


def test_queries_may_be_a_view_and_gradients_off() -> None:
    case = make(Phase.DECODE, [(1, 20), (1, 9)])
    with torch.inference_mode():
        check(evolve(case, q=torch.cat([case.q, case.q], -1)[..., :16]))


def test_nothing_is_held_after_the_end() -> None:
    one = backend(make(Phase.DECODE, [(1, 1)]))
    one.close()
    assert not one.rows


@pytest.mark.feature("V5")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("layout", shared_cases.LAYOUTS, ids=range(len(shared_cases.LAYOUTS)))
@pytest.mark.parametrize("page_size", [1, 16])
def test_shared_prefixes_give_the_attention_of_each_row_by_itself(
    layout: Any, page_size: int, dtype: torch.dtype, device: str
) -> None:
    shape = {"page_size": page_size, "head_dim": 16, "dtype": dtype, "device": device}
    case = shared_cases.make(*layout, **shape)
    check(case, with_lse=True)
    check(case, cases.add_sinks(LAYER, case.q.shape[1], case.q.device), with_lse=True)
    check(case, evolve(LAYER, softcap=0.7))
    check(case, evolve(LAYER, window=9))
    second = shared_cases.in_second_group(case)
    check(second, evolve(LAYER, group=1))


def test_the_option_decides_whether_rows_are_grouped() -> None:
    case = make(Phase.DECODE, [(1, 3)])
    for value, wanted in (("on", 1), ("off", None)):
        context = cases.context_of(case, SdpaOptions(shared_prefix=value))
        assert SdpaBackend(context).min_shared_tokens == wanted
