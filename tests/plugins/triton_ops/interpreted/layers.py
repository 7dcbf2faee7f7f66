"""Norms, heads, activation and whole layers against the torch operations."""

from __future__ import annotations

import ops_cases as cases
import pytest
import torch
from attrs import evolve
from often import often
from ops_cases import Shape

from headstock.ops.torch_ops import TorchOps
from headstock.spi import Experts, Weight
from headstock_triton.heads import rope_and_store_kv
from headstock_triton.ops import TritonOps
from headstock_triton.options import TritonOptions

TYPES = (torch.bfloat16, torch.float16, torch.float32)
SMALL = Shape(hidden=48, heads=4, kv_heads=2, head_dim=64, intermediate=40, vocab=96)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("hidden", [16, 48, 1000])
def test_norms(hidden: int, dtype: torch.dtype) -> None:
    for tokens in (0, 1, 5):
        if tokens:
            cases.norm_case(tokens, hidden, dtype, "cpu", pending=False)
            cases.norm_case(tokens, hidden, dtype, "cpu", pending=True)
            cases.embed_case(tokens, hidden, dtype, "cpu")
    nothing = torch.empty(0, hidden, dtype=dtype)
    assert cases.norm.add_norm(nothing, nothing, nothing.new_ones(hidden), 1e-6).shape == (
        0,
        hidden,
    )


def test_a_norm_of_nan_is_nan_and_stays_in_its_row() -> None:
    x = cases.noise(3, 48, dtype=torch.bfloat16, device="cpu")
    x[1, 5] = torch.nan

    found = cases.norm.add_norm(x, None, torch.ones(48, dtype=torch.bfloat16), 1e-6)

    assert found.isnan().any(1).tolist() == [False, True, False]
    assert found[1].isnan().all()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [40, 1030])
def test_activation(width: int, dtype: torch.dtype) -> None:
    cases.activation_case(3, width, dtype, "cpu")


@pytest.mark.parametrize("dtype", often(1, [torch.bfloat16, torch.float16]))
@pytest.mark.parametrize(("outs", "width"), [(40, 64), (24, 100), (18, 1100)])
def test_products_of_a_few_tokens(outs: int, width: int, dtype: torch.dtype) -> None:
    for tokens in (1, 2, 3, 4, 5, 16):
        cases.linear_case(tokens, outs, width, dtype, "cpu", bias=tokens % 2 == 0)


def test_products_are_torchs_unless_the_option_says_otherwise() -> None:
    weight = Weight(tensor=cases.noise(24, 64, dtype=torch.bfloat16, device="cpu"))
    for tokens, own in ((2, True), (3, False)):
        x = cases.noise(tokens, 64, dtype=torch.bfloat16, device="cpu")
        found = TritonOps(TritonOptions(small_linear=2)).linear(x, weight, None)
        made_by_torch = TritonOps().linear(x, weight, None)
        assert torch.equal(made_by_torch, TorchOps().linear(x, weight, None))
        expected = cases.linear.small_linear(x, weight.tensor, None) if own else made_by_torch
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", often(1, TYPES))
@pytest.mark.parametrize("head_dim", often(3, [128, 80, 64, 96, 256]))
def test_heads(head_dim: int, dtype: torch.dtype) -> None:
    shape = evolve(SMALL, head_dim=head_dim)
    for each in (shape, evolve(shape, qk_norm=False), evolve(shape, rope_dim=head_dim // 4)):
        cases.heads_case(each, 7, dtype, "cpu", page_size=4)


@pytest.mark.parametrize(
    ("heads", "kv_heads"), often(4, [(1, 1), (3, 3), (7, 1), (16, 8), (14, 2), (40, 8)])
)
def test_any_number_of_heads(heads: int, kv_heads: int) -> None:
    cases.heads_case(evolve(SMALL, heads=heads, kv_heads=kv_heads), 3, torch.bfloat16, "cpu")


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_any_page_size(page_size: int) -> None:
    for tokens in (1, 5):
        cases.heads_case(SMALL, tokens, torch.bfloat16, "cpu", page_size=page_size)


def test_many_tokens_are_shared_out_otherwise() -> None:
    cases.heads_case(SMALL, 65, torch.bfloat16, "cpu", page_size=16)


@pytest.mark.parametrize("dtype", TYPES)
def test_eight_bit_pools(dtype: torch.dtype) -> None:
    cases.heads_case(evolve(SMALL, rope_dim=16), 7, dtype, "cpu", pool_dtype=torch.float8_e4m3fn)


def test_eight_bit_pools_saturate() -> None:
    qkv = torch.tensor([[0.0] * 16 + [1e4, -1e4] + [0.0] * 14 + [500.0, torch.nan] + [1.0] * 14])
    pool = torch.zeros(2, 2, 4, 1, 16).to(torch.float8_e4m3fn)
    table, at, slots = (
        torch.stack((torch.ones(1, 8), torch.zeros(1, 8)), 1),
        torch.tensor([0]),
        torch.tensor([5]),
    )

    rope_and_store_kv(qkv, None, table, at, slots, pool, heads=1, eps=1e-6)

    key, value = pool.float()[1, :, 1, 0]
    assert key[:2].tolist() == [448.0, -448.0]
    assert value[0] == 448.0 and value[1].isnan() and value[2] == 1.0


@pytest.mark.parametrize("dtype", often(1, [torch.bfloat16, torch.float32]))
@pytest.mark.parametrize(
    "shape", [SMALL, evolve(SMALL, qk_norm=False, bias=True), evolve(SMALL, rope_dim=32)], ids=str
)
def test_whole_layers(shape: Shape, dtype: torch.dtype) -> None:
    cases.model_case(shape, 4, dtype, "cpu")


def test_layers_of_experts() -> None:
    experts = Experts(count=5, per_token=2, intermediate=24, renormalize=True)
    cases.model_case(evolve(SMALL, experts=experts), 4, torch.float32, "cpu")


def test_a_step_without_tokens() -> None:
    config = cases.config_of(SMALL)
    params = cases.params_of(config, torch.float32, "cpu")

    hidden, *_ = cases.run_model(cases.TritonOps(), config, params, 0, torch.float32, "cpu")

    assert hidden.shape == (0, SMALL.hidden)
