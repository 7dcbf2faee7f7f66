"""The plugin's own kernel for decode rows: which steps it serves, and what it computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from plugins.triton_ops.test_compile import Compiled, compiled

from headstock.errors import UsageError
from headstock.registry import load_spec, make_options
from headstock.spi import AttentionContext, LayerInfo, Phase
from headstock_conformance import attention as cases
from headstock_conformance.attention import AttentionCase
from headstock_fa import triton_decode
from headstock_fa.decode_tile import choose_tile
from headstock_fa.options import FlashOptions
from headstock_fa.step import FlashPlan
from headstock_fa.triton_decode import load_triton_decode, make_triton_decode

__all__ = ["compiled"]

LAYER = LayerInfo(index=0, group=0, scale=0.25)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(16, 8, 128), (8, 1, 256), (7, 1, 80)])
def test_tritons_compiler_takes_the_kernel(
    compiled: Compiled, heads: int, kv_heads: int, head_dim: int
) -> None:
    case = made(5, 70, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    kernel = make_triton_decode(2, cases.context_of(case, FlashOptions()))
    pool, plan = case.pool, FlashPlan.of(case.step, num_splits=1)

    kernel.attend(case.q, pool[:, 0], pool[:, 1], plan, LAYER, case.q.clone(), None)

    assert compiled == ["decode_kernel"]
    assert "griddepcontrol" not in compiled.texts["decode_kernel"]


@pytest.mark.parametrize("compiled", [90], indirect=True)
def test_earlier_keys_are_read_before_the_wait_and_nothing_is_written(compiled: Compiled) -> None:
    case = made(5, 70, heads=16, kv_heads=8, head_dim=128)
    kernel = make_triton_decode(2, cases.context_of(case, FlashOptions()))
    pool, plan = case.pool, FlashPlan.of(case.step, num_splits=1)

    evolve(kernel, pdl=True).attend(
        case.q, pool[:, 0], pool[:, 1], plan, LAYER, case.q.clone(), None
    )

    before, after = compiled.texts["decode_kernel"].split("griddepcontrol.wait")
    # 128 tokens of 256 bytes are 16 loads of 16 bytes a thread, of keys; values follow the wait.
    assert before.count("ld.global.v4") == 16
    assert "st.global" not in before and "st.global" in after and "atom" not in before


def made(*lens: int, phase: Phase = Phase.DECODE, **more: Any) -> AttentionCase:
    more = {"head_dim": 16, "dtype": torch.bfloat16} | more
    return cases.make(phase, [(1, n) for n in lens], **more)


def context(**options: Any) -> AttentionContext:
    return cases.context_of(made(5), FlashOptions(**options))


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device that says of itself that it is a Hopper; nothing can be put on it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(
        triton_decode,
        "make_triton_decode",
        lambda rows, context, least_rows=1: (least_rows, rows),
    )
    return torch.device("cuda")


def test_the_option_is_a_switch_or_a_number_of_rows() -> None:
    spec = load_spec("attention", "fa")
    found = [
        make_options(spec, (f"fa.triton_rows={text}",)).triton_rows for text in ("auto", "off", "3")
    ]
    assert found == ["auto", "off", 3]
    for text in ("0", "-1", "1025", "on"):
        with pytest.raises(UsageError, match="triton_rows"):
            make_options(spec, (f"fa.triton_rows={text}",))


def test_auto_serves_on_a_hopper_and_nowhere_else(
    hopper: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu = evolve(context(), device=hopper)
    assert load_triton_decode(on_gpu) == (1, triton_decode.MEASURED_ROWS)
    assert load_triton_decode(context()) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert load_triton_decode(on_gpu) is None
    asked = evolve(context(triton_rows=3), device=hopper)
    assert load_triton_decode(asked) == (1, 3)
    assert load_triton_decode(evolve(asked, options=FlashOptions(triton_rows="off"))) is None


@pytest.mark.parametrize(
    ("heads", "kv_heads", "least_rows"), [(16, 8, 1), (32, 8, 8), (32, 4, 16), (7, 1, 64)]
)
def test_auto_leaves_few_rows_of_many_query_heads_to_the_library(
    hopper: torch.device, heads: int, kv_heads: int, least_rows: int
) -> None:
    query = cases.query(heads=heads, kv_heads=kv_heads)
    auto = evolve(context(), device=hopper, query=query)
    assert load_triton_decode(auto) == (least_rows, triton_decode.MEASURED_ROWS)
    asked = evolve(auto, options=FlashOptions(triton_rows=5))
    assert load_triton_decode(asked) == (1, 5)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kv_dtype": "float8_e4m3fn"}, "keys of 16 bits, not float8_e4m3fn"),
        ({"heads": 130, "kv_heads": 2}, "65 query heads share a KV head; it takes up to 64"),
    ],
)
def test_what_the_kernel_cannot_read_is_left_to_the_library_or_refused(
    hopper: torch.device, change: dict[str, Any], reason: str
) -> None:
    auto = evolve(context(), device=hopper)
    auto = evolve(auto, query=cases.query(**change))
    assert load_triton_decode(auto) is None
    with pytest.raises(ValueError, match=reason):
        load_triton_decode(evolve(auto, options=FlashOptions(triton_rows=2)))


def test_a_number_is_refused_without_a_gpu_or_triton(
    hopper: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="needs a GPU, and this is cpu"):
        load_triton_decode(context(triton_rows=2))
    monkeypatch.setattr(triton_decode, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="Triton is not installed"):
        load_triton_decode(evolve(context(triton_rows=2), device=hopper))


def test_it_serves_decode_steps_of_so_many_rows() -> None:
    kernel = make_triton_decode(2, context())
    served = [
        kernel.serves(FlashPlan.of(case.step, num_splits=1, **more))
        for case, more in (
            (made(5), {}),
            (made(5, 9), {}),
            (made(5, 9, 2), {}),
            (made(5, phase=Phase.EXTEND), {}),
            (made(5), {"is_causal": False}),
        )
    ]
    assert served == [True, True, False, False, False]
    plan = FlashPlan.of(made(5).step, num_splits=1)
    assert not make_triton_decode(2, context(), least_rows=2).serves(plan)


SHAPES = [(16, 8, 128), (32, 8, 128), (32, 4, 128), (8, 1, 256), (7, 1, 80), (2, 2, 64)]


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
def test_a_tile_fits_in_shared_memory_and_fills_the_processors(
    heads: int, kv_heads: int, head_dim: int
) -> None:
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    for rows in range(1, 257):
        tile = choose_tile(rows, **shape, processors=132)
        assert tile.splits in (1, 2, 4, 8, 16, 32)
        # Keys and values of 16 bits, of the loads that run ahead; an H200 has 227 KiB.
        padded = 1 << (head_dim - 1).bit_length()
        assert tile.stages * 2 * 2 * tile.tokens * padded <= 128 * 1024
        # As many programs as processors, unless parts would be too many, or too small.
        programs = rows * kv_heads * tile.splits
        assert programs >= 132 or tile.splits == 32


@pytest.mark.parametrize(
    ("rows", "group", "expected"),
    [
        (1, 2, (128, 32, 1)),
        (8, 2, (128, 4, 1)),
        (8, 8, (128, 4, 256)),
        (16, 4, (128, 2, 1)),
        (32, 2, (64, 4, 512)),
        (32, 8, (128, 1, 256)),
        (64, 4, (64, 2, 512)),
        (64, 8, (64, 1, 512)),
        (256, 2, (64, 1, 1)),
    ],
)
def test_tiles_are_those_that_were_measured(
    rows: int, group: int, expected: tuple[int, int, int]
) -> None:
    tile = choose_tile(rows, heads=8 * group, kv_heads=8, head_dim=128, processors=132)
    assert (tile.tokens, tile.splits, tile.least_tokens) == expected


def test_partial_sums_have_room_for_every_number_of_rows() -> None:
    kernel = make_triton_decode(40, context())
    heads, kv_heads, head_dim = 4, 2, 16
    for rows in range(1, 41):
        splits = kernel.tiles[rows].splits
        assert kernel.parts.sums.numel() >= rows * splits * heads * head_dim
        assert kernel.parts.levels.numel() >= 2 * rows * splits * heads
        assert kernel.parts.counters.numel() >= rows * kv_heads
    assert not kernel.parts.counters.any()
    assert kernel.memory_bytes() > 0


def test_a_step_is_shared_out_by_the_number_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(
        "headstock_fa.decode_kernel.attend_decode_rows",
        lambda *arguments, tile, **more: seen.append(tile),
    )
    kernel = make_triton_decode(3, context())
    for case in (made(5), made(5, 9, 2)):
        plan, pool = FlashPlan.of(case.step, num_splits=1), case.pool
        kernel.attend(case.q, pool[:, 0], pool[:, 1], plan, LAYER, case.q.clone(), None)
    assert seen == [kernel.tiles[1], kernel.tiles[3]]
