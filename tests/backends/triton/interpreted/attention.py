"""The backend over interpreted kernels, against attention written out in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from often import count_examples, often

from headstock.spi import AttentionStep, LayerInfo, Phase
from headstock_conformance import attention as cases
from headstock_conformance.attention import AttentionCase
from headstock_triton_attn import backend as module
from headstock_triton_attn import launch
from headstock_triton_attn.backend import TritonBackend

LAYER = LayerInfo(index=0, group=0, scale=0.25)
PROCESSORS = 132


@pytest.fixture(autouse=True)
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many processors as an H200, so that keys are read in parts."""
    monkeypatch.setattr(module, "count_processors", lambda device: PROCESSORS)


def made(phase: Phase, lens: list[tuple[int, int]], **shape: Any) -> AttentionCase:
    """A step over a pool with NaN wherever no row has a token, in its last pages too."""
    return cases.make(phase, lens, **({"heads": 4, "kv_heads": 2, "head_dim": 16} | shape))


def open_backend(case: AttentionCase) -> TritonBackend:
    return TritonBackend(cases.context_of(case, None))


def attend(case: AttentionCase, layer: LayerInfo = LAYER) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and the LSE."""
    out, lse = cases.attend(open_backend(case), case, layer, True)
    assert lse is not None
    return out, lse


@st.composite
def rows(draw: st.DrawFn) -> tuple[Phase, list[tuple[int, int]]]:
    """A phase and its rows (query tokens, context tokens), some of which are read in parts."""
    phase = draw(st.sampled_from(Phase))
    contexts = draw(st.lists(st.sampled_from([1, 2, 15, 17, 70, 129, 300]), min_size=1, max_size=4))
    if phase is Phase.DECODE:
        return phase, [(1, context) for context in contexts]
    if phase is Phase.PREFILL:
        return phase, [(min(context, 70),) * 2 for context in contexts]
    queries = st.integers(1, 20)
    return phase, [(min(draw(queries), context), context) for context in contexts]


@settings(max_examples=count_examples(15))
@given(
    step=rows(),
    page_size=st.sampled_from([1, 3, 16, 64, 1000]),
    ratio=st.sampled_from([1, 2, 7, 8, 20]),
    kv_heads=st.integers(1, 2),
    head_dim=st.sampled_from([8, 64, 80, 192]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    window=st.sampled_from([None, 1, 9, 130]),
    softcap=st.sampled_from([0.0, 0.7]),
    with_sinks=st.booleans(),
    seed=st.integers(0, 9999),
)
def test_any_step_of_any_shape_is_attention_written_out(
    step: tuple[Phase, list[tuple[int, int]]],
    page_size: int,
    ratio: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    window: int | None,
    softcap: float,
    with_sinks: bool,
    seed: int,
) -> None:
    heads = ratio * kv_heads
    shape = {"page_size": page_size, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    case = made(*step, **shape, dtype=dtype, seed=seed)
    layer = evolve(LAYER, window=window, softcap=softcap)
    if with_sinks:
        layer = cases.add_sinks(layer, heads, "cpu")
    cases.check(open_backend(case), case, layer, with_lse=True)


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    often(1, [(512, torch.bfloat16), (512, torch.float32), (320, torch.float16)]),
)
def test_heads_of_more_than_256(phase: Phase, head_dim: int, dtype: torch.dtype) -> None:
    lens = {
        Phase.DECODE: [(1, 1), (1, 33), (1, 300)],
        Phase.EXTEND: [(9, 33), (17, 200)],
        Phase.PREFILL: [(40, 40), (1, 1)],
    }[phase]
    case = made(phase, lens, heads=8, kv_heads=1, head_dim=head_dim, dtype=dtype, page_size=32)
    layer = cases.add_sinks(evolve(LAYER, window=150), 8, "cpu")
    cases.check(open_backend(case), case, layer, with_lse=True)


@pytest.mark.parametrize(
    ("phase", "lens"), often(1, [(Phase.EXTEND, [(17, 20)]), (Phase.DECODE, [(1, 140)])])
)
def test_more_query_heads_a_kv_head_than_a_program_takes(
    phase: Phase, lens: list[tuple[int, int]]
) -> None:
    case = made(phase, lens, heads=130, kv_heads=1)
    assert open_backend(case).launches[0].decode.tile.group < 130
    cases.check(open_backend(case), case, LAYER, with_lse=True)


def test_the_scales_of_8_bit_keys_and_values_are_applied() -> None:
    case = made(Phase.DECODE, [(1, 5), (1, 300)], dtype=torch.bfloat16, head_dim=64)
    case = cases.in_8_bits(case, 0.5, 2.0)
    backend = open_backend(case)
    layer = evolve(LAYER, k_scale=0.5, v_scale=2.0)
    out, _ = cases.attend(backend, case, layer)
    cases.compare(out, cases.expected(case, LAYER)[0], 0.05)


def test_a_row_gets_the_same_bits_alone_and_in_a_batch() -> None:
    contexts = [1, 130, 300]
    for layer in (LAYER, evolve(LAYER, window=200)):
        case = made(Phase.DECODE, [(1, each) for each in contexts], dtype=torch.bfloat16)
        together, sums = attend(case, layer)
        for row, context in enumerate(contexts):
            step = cases.step_of(
                Phase.DECODE, [(1, context)], (case.step.page_tables[0][row : row + 1],)
            )
            out, lse = attend(evolve(case, step=step, q=case.q[row : row + 1]), layer)
            assert torch.equal(out[0], together[row]) and torch.equal(lse[0], sums[row])


@pytest.mark.parametrize(
    ("phase", "lens"),
    [
        (Phase.DECODE, [(1, 300), (1, 3), (1, 150), (1, 280)]),
        (Phase.EXTEND, [(2, 300), (10, 150)]),
    ],
)
def test_a_step_with_more_parts_than_there_is_room_has_several_launches(
    phase: Phase, lens: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = made(phase, lens, heads=2, kv_heads=1)
    whole, sums = attend(case)
    backend = open_backend(case)
    used = backend.launches[0].choose(backend.plan(case.step))
    monkeypatch.setattr(launch, "MOST_PARTS_BYTES", 1)
    room = launch.Parts.new([used], 64, case.q.device)
    assert room.count_blocks(used) == 1
    wider = [torch.cat((side, torch.full((9,), 7.0))) for side in (room.sums, room.levels)]
    backend.parts = launch.Parts(sums=wider[0][:-9], levels=wider[1][:-9])
    out, lse = cases.attend(backend, case, LAYER, True)
    assert lse is not None and torch.equal(out, whole) and torch.equal(lse, sums)
    assert all((side[-9:] == 7.0).all() for side in wider), "it writes past the ends of the parts"


def test_queries_and_outputs_may_be_parts_of_wider_tensors() -> None:
    case = made(Phase.EXTEND, [(3, 9), (1, 200)])
    tokens, heads, head_dim = case.q.shape
    wide_q = torch.randn(tokens, heads + 3, head_dim)
    wide_out = torch.zeros(tokens, heads + 2, head_dim)
    case = evolve(case, q=wide_q[:, 1 : heads + 1])
    backend, out = open_backend(case), wide_out[:, :heads]
    backend.forward(case.q, LAYER, backend.plan(case.step), out)
    cases.compare(out, cases.expected(case, LAYER)[0])
    assert (wide_out[:, heads:] == 0).all()


def test_one_captured_plan_serves_decode_steps_of_other_lengths() -> None:
    steps = [
        made(Phase.DECODE, [(1, context) for context in contexts])
        for contexts in ((300, 40, 3, 17), (5, 16), (64, 200, 1))
    ]
    backend = open_backend(steps[0])
    layer = cases.add_sinks(LAYER, 4, "cpu")
    cases.check_replays(backend, steps, layer, bucket=4, held=lambda plan: [plan.context_lens])


@pytest.mark.parametrize(("tokens", "is_split"), [(24, False), (12, True)])
def test_one_captured_plan_serves_steps_with_prompts(tokens: int, is_split: bool) -> None:
    """Also those of few queries, whose keys are read in parts."""
    steps = [
        made(Phase.EXTEND, lens, heads=2, kv_heads=1)
        for lens in ([(3, 150), (6, 40), (2, 3)], [(1, 1), (11, 140)], [(tokens, tokens)])
    ]
    assert (tokens <= module.FEW_QUERIES) is is_split
    cases.replayed_prompts(open_backend(steps[0]), LAYER, tokens, steps)


def test_groups_of_different_shapes_are_served_by_one_backend() -> None:
    """As in Gemma-4: layers with a window have smaller heads, and more of them for keys."""
    wide = made(Phase.DECODE, [(1, 300), (1, 5)], heads=8, kv_heads=1, head_dim=128)
    narrow = made(Phase.DECODE, [(1, 300), (1, 5)], heads=8, kv_heads=4, head_dim=32, seed=1)
    contexts = [cases.context_of(each, None) for each in (wide, narrow)]
    context = evolve(
        contexts[0],
        query=evolve(contexts[0].query, groups=tuple(each.query.groups[0] for each in contexts)),
        pools={0: wide.pool, 1: narrow.pool},
    )
    tables = wide.step.page_tables + narrow.step.page_tables
    step: AttentionStep = evolve(wide.step, page_tables=tables)
    backend = TritonBackend(context)
    plan = backend.plan(step)
    layers = (LAYER, LayerInfo(index=1, group=1, scale=0.3, window=40))
    for case, layer in zip((wide, narrow), layers, strict=True):
        out = torch.full_like(case.q, math.nan)
        backend.forward(case.q, layer, plan, out)
        cases.compare(out, cases.expected(case, layer)[0])
