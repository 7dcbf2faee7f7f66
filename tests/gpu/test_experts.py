"""Mixtures of experts on the device: multiplied together, without a number read on the host, inside
graphs too.
"""

from __future__ import annotations

import pytest
import torch
from expert_cases import GATES, WAYS, Mixture, chosen_case
from torch import Tensor

from headstock.nn.moe import (
    has_grouped_mm,
    mix_experts,
    route,
    run_experts_grouped,
    run_experts_one_by_one,
)
from headstock.spi import Experts, WeightFormat, WeightKind

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

HIDDEN, INTERMEDIATE = 512, 192
EXPERTS = Experts(count=32, per_token=4, intermediate=INTERMEDIATE, renormalize=True)


def noise(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    """Random numbers on the device."""
    made = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(*shape, generator=made, device="cuda") * scale).to(torch.bfloat16)


def weights() -> tuple[Tensor, Tensor]:
    """Those of all experts."""
    gate_up = noise(EXPERTS.count, 2 * INTERMEDIATE, HIDDEN, seed=1, scale=HIDDEN**-0.5)
    return gate_up, noise(EXPERTS.count, HIDDEN, INTERMEDIATE, seed=2, scale=INTERMEDIATE**-0.5)


@pytest.mark.feature("V4")
@pytest.mark.parametrize("tokens", [1, 2, 7, 64, 300])
def test_experts_together_are_as_near_to_float32_as_one_by_one(tokens: int) -> None:
    x, scores, (gate_up, down) = (
        noise(tokens, HIDDEN, seed=3),
        noise(tokens, EXPERTS.count, seed=4),
        weights(),
    )
    if not has_grouped_mm(x, gate_up):
        pytest.skip("no kernel for groups counted on this device")
    chosen, ids = route(scores, EXPERTS)
    order = ids.flatten().argsort(stable=True)
    grouped = x[order // EXPERTS.per_token]
    exact = run_experts_one_by_one(grouped.float(), ids, gate_up.float(), down.float())
    off = [
        (way(grouped, ids, gate_up, down).float() - exact).square().mean().sqrt().item()
        for way in (run_experts_grouped, run_experts_one_by_one)
    ]

    assert off[0] <= 1.1 * off[1]
    assert mix_experts(x, chosen, ids, gate_up, down).isfinite().all()


@pytest.mark.feature("V4")
@pytest.mark.parametrize("tokens", [1, 16, 300])
@pytest.mark.parametrize("ops", ["torch", "triton"])
def test_a_graph_of_experts_follows_the_tokens_that_it_is_replayed_with(
    ops: str, tokens: int
) -> None:
    from headstock_triton.experts import fused_mix_experts

    gate_up, down = weights()
    x = noise(tokens, HIDDEN, seed=5)
    scores = noise(tokens, EXPERTS.count, seed=6)
    if ops == "torch" and not has_grouped_mm(x, gate_up):
        pytest.skip("no kernel for groups counted on this device")

    def mix() -> Tensor:
        if ops == "triton":
            return fused_mix_experts(x, scores, EXPERTS, gate_up, down)
        return mix_experts(x, *route(scores, EXPERTS), gate_up, down)

    mix()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = mix()
    for seed in (7, 8, 9):
        x.copy_(noise(tokens, HIDDEN, seed=seed))
        # Those of the last time all choose the same few experts.
        scores.copy_(
            noise(tokens, EXPERTS.count, seed=seed + 10)
            if seed < 9
            else torch.arange(EXPERTS.count, device="cuda")
        )
        graph.replay()
        torch.testing.assert_close(found, mix(), rtol=0, atol=0)


@pytest.mark.feature("V3")
@pytest.mark.parametrize("tokens", [2, 300])
def test_measured_tiles_are_as_near_to_float32_as_those_that_are_chosen_without(
    tokens: int,
) -> None:
    from headstock_triton.experts import fused_mix_experts
    from headstock_triton.tune_experts import make_layer, time_graph, tune_layer

    layer = make_layer(EXPERTS, HIDDEN, torch.bfloat16, torch.device("cuda"), time_graph)
    tables = {layer.shape: tuple(tune_layer(layer, (tokens,)).items())}
    x, scores = noise(tokens, HIDDEN, seed=3), noise(tokens, EXPERTS.count, seed=4)
    weights = layer.gate_up, layer.down
    measured, chosen = (
        fused_mix_experts(x, scores, EXPERTS, *weights, tables=each).float()
        for each in (tables, None)
    )
    shares, ids = route(scores, EXPERTS)
    order = ids.flatten().argsort(stable=True)
    pairs = x.float()[order // EXPERTS.per_token]
    exact = torch.empty(tokens * EXPERTS.per_token, HIDDEN, device="cuda")
    exact[order] = run_experts_one_by_one(pairs, ids, *(each.float() for each in weights))
    exact = (exact.view(tokens, EXPERTS.per_token, HIDDEN) * shares[..., None]).sum(1)
    off, chosen_off = ((each - exact).square().mean().sqrt().item() for each in (measured, chosen))

    assert off <= 1.1 * chosen_off


@pytest.mark.feature("V4")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("tokens", [3, 17, 300, 5000])
def test_experts_that_were_chosen_before(tokens: int, gate: str, dtype: torch.dtype) -> None:
    case = Mixture(tokens=tokens, count=32, chosen=4, hidden=2880, inters=704)
    packed = WeightFormat(kind=WeightKind.FP8_E4M3, group=(1, 2880))
    for way in (None, *(each for name, each in WAYS.items() if name != "rows")):
        chosen_case(case, dtype, "cuda", way, gate, has_biases=gate != "silu")
    chosen_case(case, dtype, "cuda", None, gate, has_biases=False, format=packed)
