"""The fa backend over each provider's function, replaced by torch code of the same signature."""

from __future__ import annotations

import gc
import importlib
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import numpy as np
import pytest
import torch
from attrs import evolve
from backends.flash_attn import fakes
from often import often

from headstock.spi import AttentionStep, Feature, GraphSupport, LayerInfo, Phase
from headstock_conformance import attention as cases
from headstock_conformance.attention import AttentionCase
from headstock_conformance.attention import shared_prefix_cases as shared_cases
from headstock_fa import kernels
from headstock_fa.backend import FlashAttentionBackend
from headstock_fa.options import FlashOptions
from headstock_fa.providers import PROVIDERS, Provider
from headstock_fa.step import ONE_PART_TOKENS, choose_num_splits, choose_prompt_splits

PHASES = list(Phase)
LAYER = LayerInfo(index=0, group=0, scale=0.25)


@pytest.fixture(scope="module")
def vllm_operators() -> Iterator[tuple[object, object]]:
    with fakes.vllm_operators() as operators:
        yield operators


@pytest.fixture(params=PROVIDERS, ids=lambda each: each.name)
def provider(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    vllm_operators: tuple[object, object],
) -> Provider:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", fakes.interface())
    monkeypatch.setitem(sys.modules, "flash_attn", fakes.flash_attn())
    monkeypatch.setattr(
        "torch.nn.attention.varlen.varlen_attn_out", fakes.varlen_attn_out, raising=False
    )
    monkeypatch.setattr(kernels, "load_vllm", lambda: kernels.VllmKernel(*vllm_operators))
    return request.param


def backend(case: AttentionCase, provider: Provider, **options: Any) -> FlashAttentionBackend:
    return FlashAttentionBackend(cases.context_of(case, FlashOptions(**options)), provider)


def page_sizes(provider: Provider) -> tuple[int, ...]:
    return (16, 64, 40) if provider.page_step == 1 else (256,)


def decode(*lens: int, page_size: int) -> AttentionCase:
    return cases.make(
        Phase.DECODE, [(1, n) for n in lens], page_size=page_size, head_dim=16, dtype=torch.float16
    )


def two_rows(phase: Phase, provider: Provider) -> AttentionCase:
    lens = {
        Phase.DECODE: [(1, 40), (1, 3)],
        Phase.EXTEND: [(9, 40), (3, 3)],
        Phase.PREFILL: [(40, 40), (3, 3)],
    }[phase]
    return cases.make(
        phase, lens, page_size=page_sizes(provider)[0], head_dim=16, dtype=torch.float16
    )


def test_the_stand_in_for_torch_has_the_signature_of_the_function_that_it_replaces() -> None:
    module = importlib.import_module("torch.nn.attention.varlen")
    # before torch 2.13 there is none
    real = getattr(module, "varlen_attn_out", fakes.varlen_attn_out)
    for ours, theirs in zip(
        inspect.signature(fakes.varlen_attn_out).parameters.values(),
        inspect.signature(real).parameters.values(),
        strict=True,
    ):
        assert (ours.name, ours.kind, ours.default) == (theirs.name, theirs.kind, theirs.default)


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.value)
@pytest.mark.parametrize(("heads", "kv_heads"), often(2, [(4, 2), (7, 1), (2, 2)]))
@pytest.mark.parametrize("dtype", often(1, [torch.bfloat16, torch.float16]), ids=str)
def test_every_phase_agrees_with_attention_written_out(
    provider: Provider, phase: Phase, heads: int, kv_heads: int, dtype: torch.dtype
) -> None:
    for page_size in page_sizes(provider):
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
        cases.check(backend(case, provider), case, LAYER, with_lse=True)
        cases.check(backend(case, provider), case, evolve(LAYER, scale=0.4))


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.value)
@pytest.mark.parametrize("window", [1, 7, 1000])
def test_a_window_counts_the_query_itself(provider: Provider, phase: Phase, window: int) -> None:
    case = two_rows(phase, provider)
    cases.check(backend(case, provider), case, evolve(LAYER, window=window))


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.value)
def test_a_soft_cap_is_passed_on(provider: Provider, phase: Phase) -> None:
    if Feature.SOFTCAP not in provider.features:
        pytest.skip("resolve refuses it: see test_resolve.py")
    case = two_rows(phase, provider)
    cases.check(backend(case, provider), case, evolve(LAYER, softcap=2.0))


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.value)
def test_sinks_take_their_part_of_each_query(provider: Provider, phase: Phase) -> None:
    case = two_rows(phase, provider)
    layer = cases.add_sinks(evolve(LAYER, window=7), case.q.shape[1], case.q.device)
    cases.check(backend(case, provider), case, layer)
    cases.check(backend(case, provider), case, layer, with_lse=True)


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.value)
def test_8_bit_keys_and_values_are_scaled_by_layer_and_met_by_8_bit_queries(
    provider: Provider, phase: Phase
) -> None:
    if provider.generation == 2:
        pytest.skip("resolve refuses it: see test_resolve.py")
    lens = {
        Phase.DECODE: [(1, 40), (1, 3)],
        Phase.EXTEND: [(9, 40), (3, 3)],
        Phase.PREFILL: [(40, 40), (3, 3)],
    }[phase]
    case = cases.in_8_bits(cases.make(phase, lens, head_dim=16, dtype=torch.bfloat16), 0.5, 2.0)
    rounded = case.q.to(torch.float8_e4m3fn)
    layer = evolve(LAYER, k_scale=0.5, v_scale=2.0)
    one, out = backend(case, provider), torch.empty_like(case.q)

    one.forward(case.q, layer, one.plan(case.step), out)
    cases.compare(out, cases.expected(evolve(case, q=rounded.to(torch.bfloat16)), layer)[0])

    one.forward(case.q * 1e4, layer, one.plan(case.step), out)
    assert out.isfinite().all()  # queries beyond the type saturate


@pytest.mark.feature("G2")
@pytest.mark.parametrize(
    "provider", [each for each in PROVIDERS if each.graph is GraphSupport.ALWAYS], indirect=True
)
@pytest.mark.parametrize(("longest", "parts"), [(ONE_PART_TOKENS, 1), (ONE_PART_TOKENS + 1, 16)])
def test_a_captured_plan_serves_prompts_of_any_lengths(
    provider: Provider, longest: int, parts: int
) -> None:
    long = [(1, 1000), (20, 800), (3, 3), (1, 700)]
    shapes = long, [(1, 1), (2, 90), (5, 6), (20, 20)], [(9, 40), (3, 3), (1, 17)], [(30, 30)]
    made = [
        cases.make(Phase.EXTEND, rows, page_size=16, head_dim=16, dtype=torch.float16)
        for rows in shapes
    ]
    one = backend(made[0], provider)

    cases.replayed_prompts(one, LAYER, 32, made, longest=longest)
    assert one.capture_plan(bounded_step(32, longest)).num_splits == parts


def bounded_step(tokens: int, longest: int) -> AttentionStep:
    """A step of prompts in a graph, of up to so many tokens and contexts of up to `longest`."""
    return AttentionStep(
        phase=Phase.EXTEND,
        query_start=torch.zeros(2, dtype=torch.int32),
        context_lens=torch.ones(1, dtype=torch.int32),
        page_tables=(torch.zeros(1, 1, dtype=torch.int32),),
        host_query_lens=np.full(1, tokens, np.int32),
        host_context_lens=np.full(1, longest, np.int32),
    )


@pytest.mark.parametrize(
    ("tokens", "longest", "width", "parts"),
    [
        (64, 1024, 2048, 1),
        (64, 1025, 2048, 16),
        (1024, 40_000, 2048, 16),
        (1024, 40_000, 4096, 8),
        (1024, 40_000, 65_536, 1),
        (1280, 40_000, 2048, 1),
        (16, 40_000, 65_536, 4),
    ],
)
def test_prompts_in_graphs_read_long_contexts_in_as_many_parts_as_their_memory_allows(
    tokens: int, longest: int, width: int, parts: int
) -> None:
    assert choose_prompt_splits(bounded_step(tokens, longest), width) == parts


SHARING = pytest.mark.parametrize(
    "provider",
    [each for each in PROVIDERS if Feature.SHARED_PREFIX in each.features],
    indirect=True,
    ids=lambda each: each.name,
)


@pytest.mark.feature("V5")
@SHARING
@pytest.mark.parametrize("layout", range(len(shared_cases.LAYOUTS)))
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_shared_prefixes_give_the_attention_of_each_row_by_itself(
    provider: Provider, layout: int, softcap: float
) -> None:
    for page_size in page_sizes(provider):
        case = shared_cases.make(
            *shared_cases.LAYOUTS[layout], page_size=page_size, head_dim=16, dtype=torch.float16
        )
        layer = evolve(LAYER, softcap=softcap)
        cases.check(backend(case, provider), case, layer, with_lse=True)
        cases.check(backend(case, provider, num_splits=3), case, layer)
        sunk = cases.add_sinks(layer, case.q.shape[1], case.q.device)
        cases.check(backend(case, provider), case, sunk, with_lse=True)


@SHARING
def test_a_layer_with_a_window_reads_the_step_as_it_is(provider: Provider) -> None:
    layout = shared_cases.LAYOUTS[1]
    case = shared_cases.make(*layout, head_dim=16, dtype=torch.float16)
    cases.check(backend(case, provider), case, evolve(LAYER, window=20))


@SHARING
def test_8_bit_keys_of_shared_prefixes_are_scaled_once(provider: Provider) -> None:
    case = shared_cases.make(*shared_cases.LAYOUTS[0], head_dim=16, dtype=torch.bfloat16)
    case = cases.in_8_bits(case, 0.5, 2.0)
    case = evolve(case, q=case.q.to(torch.float8_e4m3fn).to(torch.bfloat16))
    cases.check(backend(case, provider), case, evolve(LAYER, k_scale=0.5, v_scale=2.0))


@pytest.mark.feature("G2")
@SHARING
def test_a_captured_step_serves_any_groups(provider: Provider) -> None:
    made = [
        shared_cases.make(*layout, head_dim=16, dtype=torch.float16)
        for layout in (*shared_cases.LAYOUTS, ([], [40, 3], []))
    ]
    made.sort(key=lambda case: len(case.pool), reverse=True)
    shared_cases.check_replays(backend(made[0], provider), LAYER, made, rows=12)


def count_schedules(backend: FlashAttentionBackend) -> Callable[[], int]:
    """How many schedules the backend's kernel has made since it was asked last."""
    kernel, made = backend.kernel, []
    assert isinstance(kernel, kernels.VllmKernel) and kernel.scheduler is not None
    make = kernel.scheduler

    def counted(values: Mapping[str, object]) -> Any:
        made.append(values)
        return make(values)

    kernel.scheduler = cast("kernels.PlacedOperator", counted)

    def count() -> int:
        found = len(made)
        made.clear()
        return found

    return count


def test_a_schedule_serves_all_layers_alike_and_every_step_has_its_own(
    vllm_operators: tuple[object, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "load_vllm", lambda: kernels.VllmKernel(*vllm_operators))
    (provider,) = (each for each in PROVIDERS if each.name == "vllm")
    case, other = decode(40, 3, page_size=16), decode(9, 33, page_size=16)
    served, out = backend(case, provider, num_splits=3), torch.empty_like(case.q)
    count = count_schedules(served)
    served.graph_init([2], cases.MAX_SEQ_LEN)
    # The stand-in for the library refuses the schedule of another step.
    for plan in (served.plan(case.step), served.graph_plan(2, case.step)):
        for layer in (LAYER, LAYER, evolve(LAYER, scale=0.4)):
            served.forward(case.q, layer, plan, out)
        assert count() == 1
        served.forward(case.q, evolve(LAYER, window=20), plan, out)
        served.forward(case.q, evolve(LAYER, window=20), plan, out)
        assert count() == 1
    addresses = [each.tensor.data_ptr() for each in plan.schedules.values()]
    served.graph_update(plan, other.step)
    served.forward(case.q, LAYER, plan, out)
    assert count() == 2
    assert [each.tensor.data_ptr() for each in plan.schedules.values()] == addresses
    one_part = backend(case, provider, num_splits=1)
    count = count_schedules(one_part)
    one_part.forward(case.q, LAYER, one_part.plan(case.step), out)
    assert count() == 0


def test_a_plan_is_gone_with_its_last_reference(
    vllm_operators: tuple[object, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "load_vllm", lambda: kernels.VllmKernel(*vllm_operators))
    (provider,) = (each for each in PROVIDERS if each.name == "vllm")
    case = decode(40, 3, page_size=16)
    served = backend(case, provider, num_splits=3)
    plan = served.plan(case.step)
    served.forward(case.q, LAYER, plan, torch.empty_like(case.q))
    schedule = weakref.ref(next(iter(plan.schedules.values())).tensor)
    gc.disable()
    try:
        del plan
        assert schedule() is None
    finally:
        gc.enable()


def test_a_scheduler_with_other_arguments_is_left_alone(
    vllm_operators: tuple[object, object],
) -> None:
    forward, scheduler = vllm_operators
    assert kernels.VllmKernel(forward, scheduler).scheduler is not None
    # Any operator with another schema stands for a later version of the library.
    assert kernels.VllmKernel(forward, torch.ops.aten.relu.default).scheduler is None


def test_the_option_decides_whether_rows_are_grouped(provider: Provider) -> None:
    case = two_rows(Phase.DECODE, provider)
    assert backend(case, provider, shared_prefix="off").min_shared_tokens is None
    worth = backend(case, provider).min_shared_tokens
    # 100 MB; 2 KV heads of 16 elements, of keys and values, in two bytes
    assert worth == 781_250
    if provider.generation == 3:
        assert backend(case, provider, shared_prefix="on").min_shared_tokens == 1
        return
    with pytest.raises(ValueError, match="shared_prefix=on needs a FlashAttention-3"):
        backend(case, provider, shared_prefix="on")


def test_a_layer_reads_the_page_table_of_its_group(provider: Provider) -> None:
    case = cases.in_second_group(two_rows(Phase.EXTEND, provider))
    cases.check(backend(case, provider), case, evolve(LAYER, group=1))


def test_a_replayed_plan_reads_the_new_step_at_the_old_addresses(provider: Provider) -> None:
    page_size = page_sizes(provider)[0]
    lens = ((5, 90, 33, 70), (17, 1), (page_size, page_size + 1, page_size - 1))
    made = [decode(*each, page_size=page_size) for each in lens]
    one = backend(made[0], provider)
    cases.check_replays(
        one,
        made,
        LAYER,
        bucket=4,
        held=lambda plan: (plan.query_start, plan.context_lens, *plan.page_tables),
    )
    plan = one.graph_plan(4, made[1].step)
    assert plan.num_splits == one.num_splits_for(4) and plan.max_context_len == cases.MAX_SEQ_LEN
    assert one.memory_bytes() == one.static.memory_bytes() > 0
    one.close()
    assert one.memory_bytes() == 0


def test_the_number_of_splits_depends_on_rows_alone_and_an_option_fixes_it(
    provider: Provider,
) -> None:
    case, extend = two_rows(Phase.DECODE, provider), two_rows(Phase.EXTEND, provider)
    assert backend(case, provider, num_splits=5).plan(case.step).num_splits == 5
    assert backend(case, provider).plan(case.step).num_splits == 1
    assert backend(case, provider, num_splits=5).plan(extend.step).num_splits == 0


def test_splits_fill_the_processors() -> None:
    assert [choose_num_splits(rows, 8, 132) for rows in (1, 2, 8, 16, 17, 256)] == [
        32,
        17,
        5,
        3,
        1,
        1,
    ]
    assert choose_num_splits(1, 1, 132) == 32


def test_vllms_library_is_found_without_importing_vllm(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    site = tmp_path_factory.mktemp("site")
    library = site / "vllm" / kernels.VLLM_LIBRARY
    library.parent.mkdir(parents=True)
    (site / "vllm" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(site))
    importlib.invalidate_caches()
    with pytest.raises(ValueError, match=r"set attn \(--attn\) to fi"):
        kernels.load_vllm()
    library.write_bytes(b"not a library")
    with pytest.raises(OSError, match=r"_vllm_fa3_C\.abi3\.so"):
        kernels.load_vllm()
    assert "vllm" not in sys.modules
