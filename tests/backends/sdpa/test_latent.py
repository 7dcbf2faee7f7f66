"""The sdpa backend over latent vectors, against attention written out in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from backends.sdpa.test_attention import DEVICES, LAYER, backend, row_lengths
from hypothesis import given, settings
from hypothesis import strategies as st

from headstock.spi import Phase
from headstock_conformance import attention as cases
from headstock_conformance.attention import TOLERANCE, AttentionCase
from headstock_conformance.attention import shared_prefix_cases as shared_cases


def make(
    phase: Phase, rows: list[tuple[int, int]], rope_dim: int = 6, **shape: Any
) -> AttentionCase:
    """A case of latent vectors, of which `rope_dim` elements carry the position."""
    shape = {"head_dim": 22, **shape}
    return cases.make_latent(cases.make(phase, rows, kv_heads=1, **shape), rope_dim)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("phase", list(Phase), ids=lambda phase: phase.value)
@given(data=st.data())
@settings(max_examples=10)
def test_every_shape_agrees_with_attention_written_out(
    phase: Phase, page_size: int, dtype: torch.dtype, device: str, data: st.DataObject
) -> None:
    def one(name: str, *values: Any) -> Any:
        return data.draw(st.sampled_from(values), name)

    dim = one("dim", 2, 7, 24, 72)
    case = make(
        phase,
        data.draw(row_lengths(phase, page_size), "rows"),
        rope_dim=one("rope_dim", 0, 1, dim // 2),
        page_size=page_size,
        heads=one("heads", 1, 3, 16),
        head_dim=dim,
        dtype=dtype,
        device=device,
        seed=data.draw(st.integers(0, 99), "seed"),
    )
    layer = evolve(
        LAYER,
        scale=dim**-0.5,
        window=one("window", None, None, 1, 16),
        softcap=one("softcap", 0.0, 0.0, 0.7),
    )
    cases.check(backend(case), case, layer, with_lse=data.draw(st.booleans(), "lse"))


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("rows", [[(200, 200)], [(130, 190), (1, 3)]])
def test_many_heads_are_scored_in_blocks_of_fewer_queries(
    rows: list[tuple[int, int]], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make(Phase.EXTEND, rows, heads=64)
    for most in (8192, 64 * 7, 1):
        monkeypatch.setattr("headstock_sdpa.rows.MOST_SCORED", most)
        cases.check(backend(case), case, evolve(LAYER, window=window))


@pytest.mark.parametrize("layout", shared_cases.LAYOUTS, ids=range(len(shared_cases.LAYOUTS)))
def test_shared_prefixes_give_the_attention_of_each_row_by_itself(layout: Any) -> None:
    case = cases.make_latent(shared_cases.make(*layout, head_dim=16, kv_heads=1), 6)

    cases.check(backend(case), case, LAYER, with_lse=True)
    cases.check(backend(case), case, evolve(LAYER, window=9))
    cases.check(backend(case), shared_cases.in_second_group(case), evolve(LAYER, group=1))
