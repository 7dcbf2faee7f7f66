"""The fa backend over each provider's function, replaced by torch code of the same signature."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator

import attention_cases as cases
import pytest
import torch
from attention_cases import Case
from backends.flash_attn import fakes

from headstock.spi import LayerInfo, Phase
from headstock_fa import kernels
from headstock_fa.backend import FlashAttentionBackend
from headstock_fa.options import FlashOptions
from headstock_fa.plugin import CAPABILITIES
from headstock_fa.providers import PROVIDERS, Provider
from headstock_fa.step import splits

PHASES = list(Phase)


@pytest.fixture(scope="module")
def vllm_operator() -> Iterator[object]:
    library = torch.library.Library("headstock_test_fa3", "DEF")
    library.define(fakes.VLLM_SCHEMA.replace("\n", " "))
    library.impl("fwd", fakes.vllm_forward, "CPU")
    yield torch.ops.headstock_test_fa3.fwd.default
    library._destroy()


@pytest.fixture(params=PROVIDERS, ids=lambda each: each.name)
def provider(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, vllm_operator: object) -> Provider:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", fakes.interface())
    monkeypatch.setitem(sys.modules, "flash_attn", fakes.flash_attn())
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn_out", fakes.varlen_attn_out, raising=False)
    monkeypatch.setattr(kernels, "load_vllm", lambda: kernels.vllm_kernel(vllm_operator))
    return request.param


def backend(case: Case, provider: Provider, **options: int) -> FlashAttentionBackend:
    return FlashAttentionBackend(cases.context_of(case, CAPABILITIES, FlashOptions(**options)), provider)


def page_sizes(provider: Provider) -> tuple[int, ...]:
    return (16, 64, 40) if provider.page_step == 1 else (256,)


def test_the_stand_in_for_torch_has_the_signature_of_the_function_that_it_replaces() -> None:
    module = importlib.import_module("torch.nn.attention.varlen")
    real = getattr(module, "varlen_attn_out", fakes.varlen_attn_out)  # before torch 2.13 there is none
    for ours, theirs in zip(
        inspect.signature(fakes.varlen_attn_out).parameters.values(),
        inspect.signature(real).parameters.values(),
        strict=True,
    ):
        assert (ours.name, ours.kind, ours.default) == (theirs.name, theirs.kind, theirs.default)


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.value)
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (7, 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_phase_agrees_with_attention_written_out(
    provider: Provider, phase: Phase, heads: int, kv_heads: int, dtype: torch.dtype
) -> None:
    for page_size in page_sizes(provider):
        lens = [(min(query, 20), context) for query, context in cases.around(phase, page_size)[:5]]
        lens = [(query, query if phase is Phase.PREFILL else context) for query, context in lens]
        case = cases.make(phase, lens, page_size=page_size, heads=heads, kv_heads=kv_heads, head_dim=16, dtype=dtype)
        cases.check(backend(case, provider), case, LayerInfo(index=0, group=0, scale=0.25), with_lse=True)
        cases.check(backend(case, provider), case, LayerInfo(index=0, group=0, scale=0.3))


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.value)
@pytest.mark.parametrize("window", [1, 7, 1000])
def test_a_window_counts_the_query_itself(provider: Provider, phase: Phase, window: int) -> None:
    lens = [(1, 40), (1, 3)] if phase is Phase.DECODE else [(9, 40), (3, 3)]
    case = cases.make(phase, lens, page_size=page_sizes(provider)[0], head_dim=8, dtype=torch.float16)
    cases.check(backend(case, provider), case, LayerInfo(index=0, group=0, scale=0.3, window=window))


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.value)
def test_a_soft_cap_is_passed_on(provider: Provider, phase: Phase) -> None:
    if provider.name == "torch":
        return  # `resolve` refuses it: see test_resolve.py
    lens = [(1, 40), (1, 3)] if phase is Phase.DECODE else [(9, 40), (3, 3)]
    case = cases.make(phase, lens, page_size=page_sizes(provider)[0], head_dim=8, dtype=torch.float16)
    cases.check(backend(case, provider), case, LayerInfo(index=0, group=0, scale=0.3, softcap=2.0))


def test_a_replayed_plan_reads_the_new_step_at_the_old_addresses(provider: Provider) -> None:
    page_size = page_sizes(provider)[0]
    made = [
        cases.make(Phase.DECODE, [(1, n) for n in lens], page_size=page_size, head_dim=16, dtype=torch.float16, seed=9)
        for lens in ((5, 90, 33), (17, 1), (page_size, page_size + 1, page_size - 1))
    ]
    layer = LayerInfo(index=0, group=0, scale=0.25)
    one = backend(made[0], provider)
    one.graph_init([1, 4], cases.MAX_SEQ_LEN)
    plan = one.graph_plan(4, made[0].step)
    addresses = [tensor.data_ptr() for tensor in (plan.query_start, plan.context_lens, *plan.page_tables)]
    for case in made:
        one.keys, one.values = {0: case.pool[:, 0]}, {0: case.pool[:, 1]}
        one.graph_update(plan, case.step)
        rows = case.step.num_rows
        q = torch.cat([case.q, case.q.new_ones(4 - rows, *case.q.shape[1:])])
        fresh = one.static.plan(4, 1, plan.num_splits)
        out = torch.full_like(q, torch.nan)
        one.forward(q, layer, fresh, out)
        assert [t.data_ptr() for t in (fresh.query_start, fresh.context_lens, *fresh.page_tables)] == addresses
        cases.compare(out[:rows], cases.expected(case, layer)[0])
        assert out.isfinite().all()
    assert one.memory_bytes() >= 4 * (5 + 4 + 4 * -(-cases.MAX_SEQ_LEN // page_size))
    one.close()
    assert one.memory_bytes() == 0


def test_the_number_of_splits_depends_on_rows_alone_and_an_option_fixes_it(provider: Provider) -> None:
    page_size = page_sizes(provider)[0]
    case = cases.make(Phase.DECODE, [(1, 90), (1, 2)], page_size=page_size, head_dim=8, dtype=torch.float16)
    assert backend(case, provider, num_splits=5).plan(case.step).num_splits == 5
    assert backend(case, provider).plan(case.step).num_splits == 1
    extend = cases.make(Phase.EXTEND, [(3, 90)], page_size=page_size, head_dim=8, dtype=torch.float16)
    assert backend(case, provider, num_splits=5).plan(extend.step).num_splits == 0


def test_splits_fill_the_processors() -> None:
    assert [splits(rows, 8, 132) for rows in (1, 2, 8, 16, 17, 256)] == [32, 17, 5, 3, 1, 1]
    assert splits(1, 1, 132) == 32


def test_vllms_library_is_found_without_importing_vllm(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    site = tmp_path_factory.mktemp("site")
    library = site / "vllm" / kernels.VLLM_LIBRARY
    library.parent.mkdir(parents=True)
    (site / "vllm" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(site))
    importlib.invalidate_caches()
    with pytest.raises(ValueError, match="use --attn fi"):
        kernels.load_vllm()
    library.write_bytes(b"not a library")
    with pytest.raises(OSError, match=r"_vllm_fa3_C\.abi3\.so"):
        kernels.load_vllm()
    assert "vllm" not in sys.modules
