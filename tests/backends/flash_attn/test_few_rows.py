"""The plugin's own kernel for few decode rows: which steps it serves, and what it computes."""

from __future__ import annotations

from typing import Any

import attention_cases as cases
import pytest
import torch
from attention_cases import Case
from attrs import evolve
from plugins.triton_ops.test_compile import Compiled, compiled

from headstock.errors import UsageError
from headstock.registry import load_spec, make_options
from headstock.spi import AttentionContext, LayerInfo, Phase
from headstock_fa import few_rows
from headstock_fa.few_rows import choose_splits, load_few_rows, make_few_rows
from headstock_fa.options import FlashOptions
from headstock_fa.step import FlashPlan

__all__ = ["compiled"]

LAYER = LayerInfo(index=0, group=0, scale=0.25)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(16, 8, 128), (8, 1, 256), (7, 1, 80)])
def test_tritons_compiler_takes_the_kernel(
    compiled: Compiled, heads: int, kv_heads: int, head_dim: int
) -> None:
    case = made(5, 70, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    kernel = make_few_rows(2, cases.context_of(case, FlashOptions()))
    pool, plan = case.pool, FlashPlan.of(case.step, num_splits=1)

    kernel.attend(case.q, pool[:, 0], pool[:, 1], plan, LAYER, case.q.clone(), None)

    assert compiled == ["few_rows_kernel"]
    assert "griddepcontrol" not in compiled.texts["few_rows_kernel"]


@pytest.mark.parametrize("compiled", [90], indirect=True)
def test_earlier_keys_are_read_before_the_wait_and_nothing_is_written(compiled: Compiled) -> None:
    case = made(5, 70, heads=16, kv_heads=8, head_dim=128)
    kernel = make_few_rows(2, cases.context_of(case, FlashOptions()))
    pool, plan = case.pool, FlashPlan.of(case.step, num_splits=1)

    evolve(kernel, pdl=True).attend(
        case.q, pool[:, 0], pool[:, 1], plan, LAYER, case.q.clone(), None
    )

    before, after = compiled.texts["few_rows_kernel"].split("griddepcontrol.wait")
    # 128 tokens of 256 bytes are 16 loads of 16 bytes a thread, of keys and as many of values.
    assert before.count("ld.global") >= 32
    assert "st.global" not in before and "st.global" in after and "atom" not in before


def made(*lens: int, phase: Phase = Phase.DECODE, **more: Any) -> Case:
    more = {"head_dim": 16, "dtype": torch.bfloat16} | more
    return cases.make(phase, [(1, n) for n in lens], **more)


def context(**options: Any) -> AttentionContext:
    return cases.context_of(made(5), FlashOptions(**options))


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device that says of itself that it is a Hopper; nothing can be put on it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(few_rows, "make_few_rows", lambda rows, context: rows)
    return torch.device("cuda")


def test_the_option_is_a_switch_or_a_number_of_rows() -> None:
    spec = load_spec("attention", "fa")
    found = [make_options(spec, (f"fa.few_rows={text}",)).few_rows for text in ("auto", "off", "3")]
    assert found == ["auto", "off", 3]
    for text in ("0", "-1", "65", "on"):
        with pytest.raises(UsageError, match="few_rows"):
            make_options(spec, (f"fa.few_rows={text}",))


def test_auto_takes_few_rows_on_a_hopper_and_none_elsewhere(
    hopper: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu = evolve(context(), device=hopper)
    assert load_few_rows(on_gpu) == few_rows.MEASURED_ROWS
    assert load_few_rows(context()) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert load_few_rows(on_gpu) is None
    asked = evolve(context(few_rows=3), device=hopper)
    assert load_few_rows(asked) == 3
    assert load_few_rows(evolve(asked, options=FlashOptions(few_rows="off"))) is None


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
    assert load_few_rows(auto) is None
    with pytest.raises(ValueError, match=reason):
        load_few_rows(evolve(auto, options=FlashOptions(few_rows=2)))


def test_a_number_is_refused_without_a_gpu_or_triton(
    hopper: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="needs a GPU, and this is cpu"):
        load_few_rows(context(few_rows=2))
    monkeypatch.setattr(few_rows, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="Triton is not installed"):
        load_few_rows(evolve(context(few_rows=2), device=hopper))


def test_it_serves_decode_steps_of_so_many_rows() -> None:
    kernel = make_few_rows(2, context())
    served = [
        kernel.serves(FlashPlan.of(case.step, num_splits=1), LAYER)
        for case in (made(5), made(5, 9), made(5, 9, 2), made(5, phase=Phase.EXTEND))
    ]
    assert served == [True, True, False, False]


def test_splits_are_a_power_of_two_that_fills_the_processors_by_rows_alone() -> None:
    assert [choose_splits(rows, 8, 132) for rows in (1, 2, 3, 8, 33, 64)] == [32, 16, 8, 4, 1, 1]
    assert choose_splits(1, 1, 132) == few_rows.MOST_SPLITS


def test_partial_sums_have_room_for_every_number_of_rows() -> None:
    kernel = make_few_rows(8, context())
    heads, kv_heads, head_dim = 4, 2, 16
    for rows in range(1, 9):
        splits = choose_splits(rows, kv_heads, kernel.processors)
        assert kernel.parts.sums.numel() >= rows * splits * heads * head_dim
        assert kernel.parts.levels.numel() >= 2 * rows * splits * heads
        assert kernel.parts.counters.numel() >= rows * kv_heads
    assert not kernel.parts.counters.any()
    assert kernel.memory_bytes() > 0
