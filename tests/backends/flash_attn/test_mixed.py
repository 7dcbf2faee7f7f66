"""Prompts behind decode rows that share pages, in graphs: the fa backend over the stand-ins."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attrs import evolve
from backends.flash_attn.test_attention import (
    LAYER,
    backend,
    page_sizes,
    provider,
    vllm_operators,
)

from headstock.spi import Feature, GraphSupport
from headstock_conformance.attention import shared_prefix_cases as shared_cases
from headstock_fa.providers import PROVIDERS, Provider

__all__ = ["provider", "vllm_operators"]

ALWAYS_SHARING = pytest.mark.parametrize(
    "provider",
    [
        each
        for each in PROVIDERS
        if Feature.SHARED_PREFIX in each.features and each.graph is GraphSupport.ALWAYS
    ],
    indirect=True,
    ids=lambda each: each.name,
)


@pytest.mark.feature("G2", "V5", "V6")
@ALWAYS_SHARING
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_a_captured_step_of_prompts_serves_any_groups_of_the_rows_before_them(
    provider: Provider, window: int | None, num_splits: int
) -> None:
    for page_size in page_sizes(provider):
        made = [
            shared_cases.make(
                *layout, prompts=prompts, page_size=page_size, head_dim=16, dtype=torch.float16
            )
            for layout, prompts in shared_cases.MIXED_LAYOUTS
        ]
        made.sort(key=lambda case: len(case.pool), reverse=True)
        one = backend(made[0], provider, num_splits=num_splits)
        shared_cases.check_mixed_replays(one, evolve(LAYER, window=window), made)


@ALWAYS_SHARING
def test_a_captured_step_may_have_more_rows_than_tokens(provider: Provider) -> None:
    layout, prompts = shared_cases.MIXED_LAYOUTS[0]
    case = shared_cases.make(*layout, prompts=prompts, head_dim=16, dtype=torch.float16)
    rows = len(case.q) + 3
    shared_cases.check_mixed_replays(
        backend(case, provider), LAYER, [case], rows=rows, tokens=len(case.q)
    )


@ALWAYS_SHARING
def test_a_captured_step_of_prompts_has_as_many_parts_as_without_groups(
    provider: Provider,
) -> None:
    layout, prompts = shared_cases.MIXED_LAYOUTS[0]
    case = shared_cases.make(*layout, prompts=prompts, head_dim=16, dtype=torch.float16)
    host = np.full(case.step.num_rows, 5000, np.int32)
    step = evolve(case.step, host_context_lens=host)
    shared = step.shared
    assert shared is not None
    shared = evolve(shared, rest=evolve(shared.rest, host_context_lens=host))
    one = backend(case, provider)
    plan = one.capture_plan(evolve(step, shared=shared))
    assert plan.shared is not None and not plan.is_decode and not plan.shared.rest.is_decode
    assert plan.num_splits == plan.shared.rest.num_splits > 1
    assert plan.is_causal and plan.shared.rest.is_causal and not plan.shared.prefixes.is_causal
    assert plan.shared.rest.shared is None
    # Steps that are launched call by call read each row by itself.
    assert one.plan(step).shared is None
    # The queries of rows that are in no group are not those of prefixes.
    assert len(plan.shared.shared_lens) == case.step.num_rows < len(case.q)
