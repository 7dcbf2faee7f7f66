"""The fi backend over latent vectors, by a fake of the library's wrapper, and what it claims."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve
from backends.flashinfer import fakes

from headstock.selection.capabilities import BackendRefused, resolve_capabilities
from headstock.spi import (
    AttentionBackend,
    AttentionCapabilities,
    DeviceEnv,
    GraphSupport,
    LatentKV,
    LayerInfo,
    Phase,
)
from headstock_conformance import attention as cases
from headstock_conformance.attention import QUERY, AttentionCase
from headstock_fi.make import make_backend
from headstock_fi.options import FlashInferOptions
from headstock_fi.plugin import spec

LAYER = LayerInfo(index=0, group=0, scale=1.0)
ENV = DeviceEnv(
    device="cuda", capability=(9, 0), distributions={"flashinfer-python": "0.6.18.post1"}
)


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(
        BatchMLAPagedAttentionWrapper=fakes.BatchMLAPagedAttentionWrapper,
    )
    monkeypatch.setitem(sys.modules, "flashinfer.mla", module)


def make(
    phase: Phase, lens: list[tuple[int, int]], page_size: int = 16, heads: int = 4
) -> AttentionCase:
    case = cases.make(
        phase, lens, page_size=page_size, heads=heads, kv_heads=1, head_dim=24, dtype=torch.bfloat16
    )
    return cases.make_latent(evolve(case, q=case.q * 0.3), 8)


def backend(case: AttentionCase, layers: int = 1) -> AttentionBackend:
    return make_backend(cases.context_of(case, FlashInferOptions(workspace_mb=16), layers))


@pytest.mark.parametrize("phase", list(Phase), ids=lambda phase: phase.value)
def test_every_phase_agrees_with_attention_written_out(phase: Phase) -> None:
    for page_size in (1, 16, 40):
        case = make(phase, cases.around(phase, page_size)[:6], page_size)
        cases.check(backend(case), case, LAYER)


def test_a_plan_outlives_one_later_plan_and_no_more() -> None:
    case = make(Phase.DECODE, [(1, 20), (1, 9)])
    one = backend(case, layers=2)
    first = one.plan(case.step)
    one.plan(case.step)
    for index in (0, 1):
        layer = evolve(LAYER, index=index, out_dim=16)
        out = layer.empty_output(case.q)
        one.forward(case.q, layer, first, out)
        cases.compare(out, cases.expected(case, layer)[0])
    one.plan(case.step)
    with pytest.raises(RuntimeError, match="this plan was overwritten"):
        one.forward(case.q, layer, first, out)
    assert one.memory_bytes() == (16 + 2 * 8) << 20
    one.close()
    assert one.memory_bytes() == 0


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_bucket_s_buffers_are_planned_anew_for_each_step(page_size: int) -> None:
    first, second = (
        make(Phase.DECODE, [(1, length) for length in lens], page_size)
        for lens in ([20, 7, 33], [9, 41])
    )
    one = backend(second)
    one.graph_init([4, 2], 64)
    plan = one.graph_plan(4, first.step)
    one.graph_update(plan, second.step)
    # A plan outside of graphs leaves those of graphs alone.
    one.plan(first.step)

    layer = evolve(LAYER, out_dim=16)
    q = torch.cat((second.q, second.q[:2]))
    out = layer.empty_output(q)
    one.forward(q, layer, plan, out)

    cases.compare(out[:2], cases.expected(second, layer)[0])
    assert out[2:].isfinite().all(), "rows that pad a graph read one token of the dummy page"
    assert one.memory_bytes() > (16 + 3 * 8) << 20
    one.close()
    assert one.memory_bytes() == 0


def test_layers_of_two_scales_are_refused() -> None:
    case = make(Phase.DECODE, [(1, 3)])
    context = cases.context_of(case, FlashInferOptions(workspace_mb=16), 2)
    layers = {**context.layers, 1: evolve(context.layers[1], scale=0.5)}
    with pytest.raises(
        ValueError, match=r"by 0.5 and by 1.0, .* one scale; set attn \(--attn\) to sdpa"
    ):
        make_backend(evolve(context, layers=layers))


def query(dim: int = 576, rope_dim: int = 64, **changes: Any) -> Any:
    (group,) = QUERY.groups
    layout = LatentKV(dim=dim, rope_dim=rope_dim)
    return evolve(QUERY, groups=(evolve(group, layout=layout, heads=128, **changes),))


def test_what_is_claimed_of_latent_vectors() -> None:
    answer = resolve_capabilities(spec(), query(), ENV)
    assert isinstance(answer, AttentionCapabilities)
    assert answer.graph is GraphSupport.DECODE and not answer.contiguous and not answer.features

    with pytest.raises(BackendRefused, match=r"latent vectors of 256 with 64 .*: 512 with 64"):
        resolve_capabilities(spec(), query(dim=320), ENV)
    with pytest.raises(BackendRefused, match="bfloat16 with float8_e4m3fn KV is not supported"):
        resolve_capabilities(spec(), query(kv_dtype="float8_e4m3fn"), ENV)
    with pytest.raises(BackendRefused, match="contiguous regions are not supported"):
        resolve_capabilities(spec(), evolve(query(), contiguous=True), ENV)
