"""The fi backend over FlashInfer's wrappers, replaced by torch code of the same signatures."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve
from backends.flashinfer import fakes
from often import often

from headstock.spi import LayerInfo, Phase
from headstock_conformance import attention as cases
from headstock_conformance.attention import AttentionCase
from headstock_fi.backend import INT_WORKSPACE, FlashInferBackend, Reach
from headstock_fi.library import Shape, partial_bytes
from headstock_fi.options import FlashInferOptions
from headstock_fi.staging import TURNS, StagedWrapper

PHASES = list(Phase)
LAYER = LayerInfo(index=0, group=0, scale=0.25)
ALL = Reach.of(LAYER)


@pytest.fixture(params=["0.6.18", "0.7.2"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    module = fakes.flashinfer(request.param)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setitem(
        sys.modules, "flashinfer.decode", SimpleNamespace(fast_decode_plan=fakes.fast_decode_plan)
    )
    return module


def backend(
    case: AttentionCase, layers: int = 1, layer: LayerInfo | None = None, **options: Any
) -> FlashInferBackend:
    """One of several layers alike, or of `layer` alone."""
    made = FlashInferOptions(**({"workspace_mb": 16} | options))
    context = cases.context_of(case, made, layers)
    return FlashInferBackend(context if layer is None else evolve(context, layers={0: layer}))


def decode(lens: list[int], **shape: Any) -> AttentionCase:
    return cases.make(
        Phase.DECODE, [(1, n) for n in lens], **({"head_dim": 16, "dtype": torch.float16} | shape)
    )


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.value)
@pytest.mark.parametrize(("heads", "kv_heads"), often(2, [(4, 2), (7, 1), (2, 2)]))
@pytest.mark.parametrize("dtype", often(1, [torch.bfloat16, torch.float16]), ids=str)
def test_every_phase_agrees_with_attention_written_out(
    library: SimpleNamespace, phase: Phase, heads: int, kv_heads: int, dtype: torch.dtype
) -> None:
    for page_size in (16, 64, 40):
        lens = cases.around(phase, page_size)[:5]
        case = cases.make(
            phase,
            lens,
            page_size=page_size,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=16,
            dtype=dtype,
        )
        one = backend(case)
        cases.check(one, case, LAYER, with_lse=True)
        cases.check(one, case, evolve(LAYER, scale=0.4))
        cases.check(one, case, cases.add_sinks(LAYER, heads, case.q.device))


def test_8_bit_keys_and_values_are_scaled_by_layer(library: SimpleNamespace) -> None:
    for phase, lens in ((Phase.DECODE, [(1, 33), (1, 2)]), (Phase.EXTEND, [(5, 33), (2, 2)])):
        case = cases.in_8_bits(cases.make(phase, lens, head_dim=16, dtype=torch.bfloat16), 0.5, 2.0)
        cases.check(backend(case), case, evolve(LAYER, k_scale=0.5, v_scale=2.0))


def test_a_plan_serves_many_layers_and_each_brings_its_scale(library: SimpleNamespace) -> None:
    case = decode([20, 9])
    one = backend(case, layers=3)
    plan = one.plan(case.step)
    for index, scale in enumerate((0.1, 0.25, 0.5)):
        out = torch.empty_like(case.q)
        layer = LayerInfo(index=index, group=0, scale=scale)
        one.forward(case.q, layer, plan, out)
        cases.compare(out, cases.expected(case, layer)[0])


def test_a_layer_reads_the_page_table_of_its_group(library: SimpleNamespace) -> None:
    case = cases.in_second_group(decode([20, 9]))
    layer = evolve(LAYER, group=1)
    cases.check(backend(case, layer=layer), case, layer)


@pytest.mark.parametrize("window", [1, 9, 17, 300])
def test_windows_are_planned_for_layers_that_have_them(
    library: SimpleNamespace, window: int
) -> None:
    layer = evolve(LAYER, window=window)
    for phase, lens in ((Phase.DECODE, [(1, 33), (1, 2)]), (Phase.EXTEND, [(5, 33), (2, 2)])):
        case = cases.make(phase, lens, head_dim=16)
        cases.check(backend(case, layer=layer), case, layer)
        cases.check(backend(case, layer=layer), case, cases.add_sinks(layer, 4, case.q.device))
    made = [decode(lens, seed=9) for lens in ([5, 90, 33, 70], [17, 1])]
    cases.check_replays(
        backend(made[0], layer=layer),
        made,
        layer,
        bucket=4,
        held=lambda plan: plan.wrappers[0].wrapper.static,
    )


def test_layers_of_one_group_with_and_without_windows(library: SimpleNamespace) -> None:
    case = decode([20, 9])
    wide, narrow = LAYER, evolve(LAYER, index=1, window=4)
    context = cases.context_of(case, FlashInferOptions(workspace_mb=16), 2)
    one = FlashInferBackend(evolve(context, layers={0: wide, 1: narrow}))
    plan = one.plan(case.step)
    for layer in (narrow, wide, narrow):
        out = torch.empty_like(case.q)
        one.forward(case.q, layer, plan, out)
        cases.compare(out, cases.expected(case, layer)[0])


def test_the_next_step_is_planned_while_one_is_in_flight(library: SimpleNamespace) -> None:
    made = [decode([20, 9], seed=1), decode([3, 30, 17], seed=2)]
    one = backend(made[0])
    plans = [one.plan(case.step) for case in made]  # the fake uploads as late as its first run
    for case, plan in zip(made, plans, strict=True):
        one.pools = {0: case.pool}
        out = torch.empty_like(case.q)
        one.forward(case.q, LAYER, plan, out)
        cases.compare(out, cases.expected(case, LAYER)[0])


def test_a_plan_that_was_overwritten_is_found_out(library: SimpleNamespace) -> None:
    case = decode([20, 9])
    one = backend(case)
    plan = one.plan(case.step)
    for _ in range(TURNS - 1):
        one.plan(case.step)
    one.forward(case.q, LAYER, plan, torch.empty_like(case.q))
    one.plan(case.step)
    with pytest.raises(RuntimeError, match="overwritten"):
        one.forward(case.q, LAYER, plan, torch.empty_like(case.q))


class Recorded:
    """A fence that notes what happens."""

    def __init__(self, notes: list[str]) -> None:
        self.notes = notes

    def record(self) -> None:
        self.notes.append("record")

    def synchronize(self) -> None:
        self.notes.append("synchronize")


def test_host_buffers_are_written_only_after_their_last_upload(
    library: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    monkeypatch.setattr("headstock_fi.staging.make_fence", lambda device: Recorded(notes))
    stage = StagedWrapper.stage
    monkeypatch.setattr(
        StagedWrapper,
        "stage",
        lambda staged, arrays: notes.append("write") or stage(staged, arrays),
    )
    case = decode([20, 9])
    one = backend(case)
    notes.clear()
    for _ in range(3):
        one.plan(case.step)
    one.graph_init([2], cases.MAX_SEQ_LEN)
    one.graph_update(one.graph_plan(2, case.step), case.step)
    # a bucket is planned when it is made, too
    assert notes == ["synchronize", "write", "record"] * 6


def test_a_replayed_plan_reads_the_new_step_at_the_old_addresses(library: SimpleNamespace) -> None:
    made = [decode(lens, seed=9) for lens in ([5, 90, 33, 70], [17, 1], [16, 17, 15, 2])]
    one = backend(made[0])
    cases.check_replays(
        one, made, LAYER, bucket=4, held=lambda plan: plan.wrappers[0].wrapper.static
    )


@pytest.mark.parametrize(
    ("ratio", "option", "used"),
    [
        (1, "auto", False),
        (2, "auto", True),
        (7, "auto", True),
        (7, "off", True),
        (4, "off", False),
        (1, "on", True),
    ],
)
def test_tensor_cores_by_ratio_or_option(
    library: SimpleNamespace, ratio: int, option: str, used: bool
) -> None:
    one = backend(decode([3], heads=ratio, kv_heads=1), tensor_cores=option)
    assert {staged.wrapper.use_tensor_cores for staged in one.ring(True, ALL).wrappers} == {used}


@pytest.mark.parametrize("name", ["auto", "fa2", "fa3"])
def test_the_templates_for_prompts_by_option(library: SimpleNamespace, name: str) -> None:
    one = backend(decode([3]), prefill=name)
    assert {staged.wrapper.backend for staged in one.ring(False, ALL).wrappers} == {name}


def test_templates_that_cannot_read_the_kv_are_refused_by_the_option_s_name(
    library: SimpleNamespace,
) -> None:
    case = cases.in_8_bits(decode([3], dtype=torch.bfloat16), 1.0, 1.0)
    with pytest.raises(
        ValueError, match=r"fi\.prefill=fa3 does not read float8_e4m3fn KV; use fi\.prefill=auto"
    ):
        backend(case, prefill="fa3")


def test_only_what_serves_the_phases_is_made(library: SimpleNamespace) -> None:
    case = decode([3])
    context = cases.context_of(case, FlashInferOptions(workspace_mb=16))
    one = FlashInferBackend(
        evolve(context, query=evolve(context.query, phases=frozenset({Phase.DECODE})))
    )
    assert list(one.rings) == [(True, ALL)]
    assert one.memory_bytes() == (16 << 20) + TURNS * INT_WORKSPACE
    one.close()
    assert one.memory_bytes() == 0


def test_building_it_runs_every_kind_of_step_once(library: SimpleNamespace) -> None:
    one = backend(decode([3]))
    assert [
        [getattr(staged.wrapper, "plans", 0) for staged in one.ring(kind, ALL).wrappers]
        for kind in (True, False)
    ] == [
        [1, 0],
        [1, 0],
    ]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "rows", "mebibytes"),
    [(16, 8, 256, 36), (32, 8, 256, 80), (32, 8, 512, 161), (40, 8, 512, 211), (64, 8, 256, 193)],
)
def test_the_workspace_holds_what_graphs_of_larger_shapes_split(
    heads: int, kv_heads: int, rows: int, mebibytes: int
) -> None:
    shape = Shape(
        heads=heads, kv_heads=kv_heads, head_dim=128, page_size=64, q_dtype=None, kv_dtype=None
    )
    assert round(partial_bytes(shape, rows, processors=132) / 2**20) == mebibytes


def test_the_workspace_grows_with_the_rows_from_what_the_option_asks_for(
    library: SimpleNamespace,
) -> None:
    case = decode([5], heads=64, kv_heads=8, head_dim=128)
    for rows, wanted in ((8, 16 << 20), (512, None)):
        context = cases.context_of(case, FlashInferOptions(workspace_mb=16), max_rows=rows)
        made = FlashInferBackend(context)
        assert (
            made.workspace.nbytes == wanted
            or partial_bytes(made.shape, rows, 1) == made.workspace.nbytes > 16 << 20
        )


def test_kernels_that_cannot_be_compiled_are_an_error_that_says_what_helps(
    library: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_once(self: FlashInferBackend, phases: object) -> None:
        raise RuntimeError(
            "Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist"
        )

    monkeypatch.setattr(FlashInferBackend, "run_once", run_once)
    with pytest.raises(
        ValueError,
        match=r"Could not find nvcc.*flashinfer-jit-cache.*another backend by attn \(--attn\)",
    ):
        backend(decode([5]))
