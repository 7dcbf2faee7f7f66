"""The fa backend over latent vectors, by fakes of FlashAttention-3, and what it claims."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from backends.flash_attn import fakes

from headstock.selection.capabilities import BackendRefused, resolve_capabilities
from headstock.spi import (
    AttentionCapabilities,
    DeviceEnv,
    GraphSupport,
    LatentKV,
    LayerInfo,
    LayoutKind,
    Phase,
)
from headstock_conformance import attention as cases
from headstock_conformance.attention import QUERY, AttentionCase
from headstock_fa import kernels
from headstock_fa.latent import LatentBackend
from headstock_fa.options import FlashOptions
from headstock_fa.plugin import spec
from headstock_fa.providers import PROVIDERS, Provider

LAYER = LayerInfo(index=0, group=0, scale=0.07)
RANK, ROPE_DIM = 512, 64
THIRD = [each for each in PROVIDERS if each.generation == 3]


@pytest.fixture(params=THIRD, ids=lambda each: each.name)
def provider(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Provider]:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", fakes.interface())
    with fakes.vllm_operators() as operators:
        monkeypatch.setattr(kernels, "load_vllm", lambda: kernels.VllmKernel(*operators))
        yield request.param


def make(phase: Phase, lens: list[tuple[int, int]], page_size: int = 16) -> AttentionCase:
    case = cases.make(
        phase,
        lens,
        page_size=page_size,
        heads=4,
        kv_heads=1,
        head_dim=RANK + ROPE_DIM,
        dtype=torch.bfloat16,
    )
    return cases.make_latent(case, ROPE_DIM)


def backend(case: AttentionCase, provider: Provider, **options: Any) -> LatentBackend:
    return LatentBackend(cases.context_of(case, FlashOptions(**options)), provider)


@pytest.mark.parametrize("phase", list(Phase), ids=lambda phase: phase.value)
def test_every_phase_agrees_with_attention_written_out(phase: Phase, provider: Provider) -> None:
    for page_size in (1, 16, 40):
        case = make(phase, cases.around(phase, page_size)[:5], page_size)
        cases.check(backend(case, provider), case, LAYER)


def test_a_graph_s_buckets_are_filled_anew_for_each_step(provider: Provider) -> None:
    first, second = (
        make(Phase.DECODE, [(1, length) for length in lens]) for lens in ([20, 7, 33], [9, 41])
    )
    one = backend(evolve(second, pool=second.pool), provider)
    one.graph_init([4, 2], 64)
    plan = one.graph_plan(4, first.step)
    one.graph_update(plan, second.step)

    layer = evolve(LAYER, out_dim=RANK)
    q = torch.cat((second.q, second.q[:2]))
    out = layer.empty_output(q)
    one.forward(q, layer, plan, out)

    cases.compare(out[:2], cases.expected(second, layer)[0])
    assert one.memory_bytes() > 0
    one.close()
    assert one.memory_bytes() == 0


def test_decode_rows_are_split_and_prompts_are_read_in_one_part(provider: Provider) -> None:
    case = make(Phase.DECODE, [(1, 20), (1, 9)])
    one = backend(case, provider)
    one.processors = 132
    assert one.blocks_per_row == 1 and one.plan(case.step).num_splits == 32
    one.blocks_per_row = 2
    assert one.num_splits_for(33) == 4 and one.num_splits_for(66) == 1
    prompt = make(Phase.EXTEND, [(16, 20), (3, 9)])
    assert backend(prompt, provider, num_splits=5).plan(prompt.step).num_splits == 1
    few = make(Phase.EXTEND, [(3, 20), (3, 9)])
    assert backend(few, provider, num_splits=5).capture_plan(few.step).num_splits == 5


@pytest.mark.parametrize(("longest", "parts"), [(1024, 1), (1025, 16)])
def test_prompts_in_graphs_for_long_contexts_are_read_in_parts(
    provider: Provider, longest: int, parts: int
) -> None:
    case = make(Phase.EXTEND, [(16, 20), (3, 9)])
    step = evolve(case.step, host_context_lens=np.full(2, longest, np.int32))
    assert backend(case, provider).capture_plan(step).num_splits == parts
    assert backend(case, provider, num_splits=5).capture_plan(step).num_splits == 1


def test_rows_that_verify_drafts_and_fill_the_device_are_read_in_one_part(
    provider: Provider,
) -> None:
    case = make(Phase.EXTEND, [(2, 20), (2, 9)])
    one = backend(case, provider)
    one.processors = 2
    step = evolve(case.step, host_context_lens=np.full(2, 4096, np.int32))
    assert one.capture_plan(step).num_splits == 1


def query(dim: int = 576, rope_dim: int = 64, **changes: Any) -> Any:
    (group,) = QUERY.groups
    layout = LatentKV(dim=dim, rope_dim=rope_dim)
    return evolve(QUERY, groups=(evolve(group, layout=layout, heads=128, **changes),))


def env(**distributions: str) -> DeviceEnv:
    return DeviceEnv(device="cuda", capability=(9, 0), distributions=distributions)


def test_what_is_claimed_of_latent_vectors() -> None:
    answer = resolve_capabilities(spec(), query(), env(vllm="0.24.0"))
    assert isinstance(answer, AttentionCapabilities)
    assert answer.layouts == {LayoutKind.LATENT} and answer.graph is GraphSupport.ALWAYS
    assert not answer.contiguous and not answer.features

    def refused(match: str, asked: Any, **distributions: str) -> None:
        with pytest.raises(BackendRefused, match=match):
            resolve_capabilities(spec(), asked, env(**distributions))

    refused(r"latent vectors of 256 with 64 .* reads 512 with 64", query(dim=320), vllm="0.24.0")
    refused(
        r"flash-attn \(FlashAttention-2\) cannot read latent", query(), **{"flash-attn": "2.8.0"}
    )
    refused("float8_e4m3fn KV is not supp", query(kv_dtype="float8_e4m3fn"), vllm="0.24.0")
    refused("contiguous regions", evolve(query(), contiguous=True), vllm="0.24.0")
