"""The trtllm backend over the library's functions, replaced by torch code of the same
signatures.
"""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve
from backends.trtllm import fakes
from often import often

from headstock.nn.attention.paged_plan import PagedPlan
from headstock.spi import DeviceEnv, LayerInfo, Phase
from headstock_conformance import attention as cases
from headstock_conformance.attention import AttentionCase
from headstock_trtllm import modules
from headstock_trtllm.backend import TrtllmBackend, load_kernels
from headstock_trtllm.kernels import DECODE_WORKSPACE, PREFILL_WORKSPACE, Blackwell, Hopper, Kernels

PHASES = list(Phase)
LAYER = LayerInfo(index=0, group=0, scale=0.25)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, functions in fakes.FUNCTIONS.items():
        monkeypatch.setitem(
            sys.modules, name, SimpleNamespace(**{each.__name__: each for each in functions})
        )


@pytest.fixture(params=["hopper", "blackwell"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return Hopper(CPU) if request.param == "hopper" else Blackwell(CPU, fakes.MAX_SEQ_LEN)


def backend(
    case: AttentionCase, kernels: Kernels, *, layers: int = 1, phases: Any = PHASES
) -> TrtllmBackend:
    context = cases.context_of(case, None, layers)
    return TrtllmBackend(
        evolve(context, query=evolve(context.query, phases=frozenset(phases))), kernels
    )


def made(phase: Phase, lens: list[tuple[int, int]], **shape: Any) -> AttentionCase:
    return cases.make(phase, lens, **({"head_dim": 16, "dtype": torch.bfloat16} | shape))


def decode(*lens: int, **shape: Any) -> AttentionCase:
    return made(Phase.DECODE, [(1, n) for n in lens], **shape)


def test_the_stand_ins_take_what_the_library_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in fakes.FUNCTIONS:
        monkeypatch.delitem(sys.modules, name)
    for name, functions in fakes.FUNCTIONS.items():
        library = import_module(name) if find_spec("flashinfer") else None
        for ours in functions:
            theirs = inspect.signature(getattr(library, ours.__name__, ours)).parameters
            for parameter in inspect.signature(ours).parameters.values():
                assert theirs[parameter.name].default == parameter.default


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.value)
@pytest.mark.parametrize(("heads", "kv_heads"), often(2, [(4, 2), (7, 1), (2, 2)]))
def test_every_phase_agrees_with_attention_written_out(
    kernels: Kernels, phase: Phase, heads: int, kv_heads: int
) -> None:
    for page_size in (16, 64, 128):
        lens = cases.around(phase, page_size)[:5]
        case = made(phase, lens, page_size=page_size, heads=heads, kv_heads=kv_heads)
        one = backend(case, kernels)
        cases.check(one, case, LAYER)
        cases.check(one, case, evolve(LAYER, scale=0.4))


def test_float16_is_for_decode_on_hopper_and_for_all_on_blackwell() -> None:
    case = decode(33, 2, dtype=torch.float16)
    cases.check(backend(case, Hopper(CPU), phases=[Phase.DECODE]), case, LAYER)
    for phase, lens in ((Phase.PREFILL, [(9, 9), (20, 20)]), (Phase.DECODE, [(1, 33)])):
        case = made(phase, lens, dtype=torch.float16)
        cases.check(backend(case, Blackwell(CPU, fakes.MAX_SEQ_LEN)), case, LAYER)


def test_8_bit_keys_and_values_are_scaled_by_layer() -> None:
    case = cases.in_8_bits(decode(33, 2), 0.5, 2.0)
    cases.check(
        backend(case, Hopper(CPU), phases=[Phase.DECODE]),
        case,
        evolve(LAYER, k_scale=0.5, v_scale=2.0),
    )


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.value)
def test_queries_and_page_tables_may_be_parts_of_wider_tensors(
    kernels: Kernels, phase: Phase
) -> None:
    lens = [(1, 33), (1, 2)] if phase is Phase.DECODE else [(5, 5), (33, 33)]
    case = made(phase, lens)
    table = case.step.page_tables[0]
    wide = torch.cat([table, torch.full_like(table, 9999)], 1)[:, : table.shape[1]]
    packed = torch.cat([case.q, torch.full_like(case.q, torch.nan)], 1)[:, : case.q.shape[1]]
    assert not wide.is_contiguous() and not packed.is_contiguous()
    cases.check(
        backend(case, kernels),
        evolve(case, q=packed, step=evolve(case.step, page_tables=(wide,))),
        LAYER,
    )


def test_a_layer_reads_its_pool_and_the_page_table_of_its_group(kernels: Kernels) -> None:
    case = cases.in_second_group(decode(20, 9))
    one = backend(case, kernels, layers=3)
    one.pools[1] = torch.zeros_like(case.pool)
    for index, scale in ((0, 0.1), (2, 0.5)):
        cases.check(one, case, LayerInfo(index=index, group=1, scale=scale))


def test_a_replayed_plan_reads_the_new_step_at_the_old_addresses(kernels: Kernels) -> None:
    steps = [decode(*lens, seed=9) for lens in ((5, 90, 33, 70), (17, 1), (16, 17, 15, 2))]
    one = backend(steps[0], kernels)
    cases.check_replays(
        one,
        steps,
        LAYER,
        bucket=4,
        held=lambda plan: (plan.query_start, plan.context_lens, *plan.page_tables),
    )
    assert one.graph_plan(4, steps[1].step).max_context_len == cases.MAX_SEQ_LEN


def test_buckets_share_one_set_of_buffers_which_is_counted() -> None:
    case = decode(5)
    one = backend(case, Hopper(CPU))
    assert one.memory_bytes() == PREFILL_WORKSPACE + DECODE_WORKSPACE
    one.graph_init([1, 4], 100)
    small, large = one.graph_plan(1, case.step), one.graph_plan(4, case.step)
    assert small.page_tables[0].data_ptr() == large.page_tables[0].data_ptr()
    assert one.memory_bytes() == PREFILL_WORKSPACE + DECODE_WORKSPACE + 4 * (5 + 4 + 4 * 7)


def test_prompts_leave_the_semaphores_of_decode_alone() -> None:
    prompts, tokens = made(Phase.PREFILL, [(9, 9)]), decode(20, 9)
    one = backend(prompts, Hopper(CPU))
    # the stand-in for XQA refuses semaphores that are not zero
    for case in (prompts, tokens, prompts, tokens):
        one.pools = {0: case.pool}
        cases.check(one, case, LAYER)


@pytest.mark.parametrize(
    ("phases", "calls"),
    [(PHASES, [False, True]), ([Phase.DECODE], [True]), ([Phase.PREFILL, Phase.EXTEND], [False])],
)
def test_building_it_runs_each_kernel_once_on_the_dummy_page(
    phases: list[Phase], calls: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[PagedPlan] = []
    forward = TrtllmBackend.forward
    monkeypatch.setattr(
        TrtllmBackend,
        "forward",
        lambda one, q, layer, plan, out: plans.append(plan) or forward(one, q, layer, plan, out),
    )
    backend(decode(3), Hopper(CPU), phases=phases)
    assert sorted(plan.is_decode for plan in plans) == calls
    assert all(
        plan.context_lens.tolist() == [1] and not plan.page_tables[0].any() for plan in plans
    )


@pytest.mark.parametrize(
    ("capability", "kind"), [((9, 0), Hopper), ((10, 0), Blackwell), ((10, 3), Blackwell)]
)
def test_the_device_says_whose_functions_serve_and_only_hopper_compiles(
    capability: tuple[int, int], kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs: list[modules.KernelNeed] = []
    monkeypatch.setattr(modules, "ensure_compiled", needs.append)
    context = cases.context_of(decode(3), None)
    assert type(load_kernels(context, DeviceEnv(device="cuda", capability=capability))) is kind
    asked = [(need.head_dims, need.page_sizes, need.ratios, need.phases) for need in needs]
    assert asked == [((16,), (16,), (2,), frozenset(Phase))] * (kind is Hopper)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (12, 0)])
def test_other_devices_are_refused_with_a_reason(capability: tuple[int, int]) -> None:
    context = cases.context_of(decode(3), None)
    said = rf"serve cuda sm_90.* sm_100.* this is cuda sm_{capability[0]}.*--attn\) to fi"
    with pytest.raises(ValueError, match=said):
        load_kernels(context, DeviceEnv(device="cuda", capability=capability))
    with pytest.raises(ValueError, match=r"this is cpu; set attn \(--attn\) to fi"):
        TrtllmBackend(context)


def test_a_closed_backend_holds_nothing() -> None:
    one = backend(decode(3), Hopper(CPU))
    one.graph_init([2], 100)
    one.close()
    assert one.memory_bytes() == 0 and one.pools == {}
