"""Norms, rotary positions, the pool and experts against plain definitions."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F

from headstock.nn.kv import kv_cells, store_kv_
from headstock.nn.moe import (
    has_grouped_mm,
    mix_experts,
    route,
    run_experts_grouped,
    run_experts_one_by_one,
)
from headstock.nn.norm import head_norm, rms_norm
from headstock.nn.rope import CosSin, rope_table, rotate_
from headstock.spi import Experts, Rope


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_rms_norm_is_its_formula() -> None:
    x, weight = noise(5, 12), noise(12, seed=1)

    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected)


def test_head_norm_weighs_each_head_by_its_row() -> None:
    x, weight = noise(5, 3, 12), noise(3, 12, seed=1)

    found = head_norm(x, weight, 1e-5)

    for head in range(3):
        torch.testing.assert_close(found[:, head], rms_norm(x[:, head], weight[head], 1e-5))


@pytest.mark.parametrize("dim", [8, 6])
def test_rotation_turns_pairs_and_passes_the_rest(dim: int) -> None:
    x, positions = noise(4, 2, 8), torch.tensor([0, 1, 5, 90])
    table = rope_table(Rope(theta=100.0, dim=dim), 91, 91)
    out = torch.empty_like(x)

    rotate_(x, CosSin.at_positions(table, positions, x.dtype), out)

    angles = positions[:, None, None] / 100.0 ** (torch.arange(0, dim, 2) / dim)
    pairs = torch.complex(x[..., : dim // 2], x[..., dim // 2 : dim]) * torch.polar(
        torch.ones_like(angles), angles
    )
    torch.testing.assert_close(out, torch.cat((pairs.real, pairs.imag, x[..., dim:]), -1))


def test_rotation_in_place() -> None:
    x = noise(3, 2, 8)
    turns = CosSin.at_positions(
        rope_table(Rope(theta=100.0, dim=8), 10, 10), torch.tensor([1, 2, 9]), x.dtype
    )
    out = torch.empty_like(x)
    rotate_(x, turns, out)

    rotate_(x, turns, x)

    assert torch.equal(x, out)


def test_keys_and_values_go_to_their_slots_and_nowhere_else() -> None:
    pool, kv = torch.zeros(5, 2, 4, 2, 3), noise(3, 2, 2, 3)
    slots = torch.tensor([4, 19, 10])

    store_kv_(pool, kv_cells(slots, 4), kv)

    for slot, token in zip(slots.tolist(), kv, strict=True):
        assert torch.equal(pool[slot // 4, :, slot % 4], token)
    assert pool.count_nonzero() == kv.numel()


def test_eight_bit_pools_saturate() -> None:
    pool = torch.zeros(2, 2, 4, 1, 2, dtype=torch.float8_e4m3fn)

    store_kv_(
        pool, kv_cells(torch.tensor([5]), 4), torch.tensor([1.0, 1e4, -1e4, 0.3]).view(1, 2, 1, 2)
    )

    assert pool[1, :, 1].float().flatten().tolist() == [1.0, 448.0, -448.0, 0.3125]
    assert pool.float().count_nonzero() == 4


@pytest.mark.parametrize("renormalize", [False, True])
def test_experts_token_by_token(renormalize: bool) -> None:
    experts = Experts(count=5, per_token=2, intermediate=6, renormalize=renormalize)
    x, scores = noise(7, 4), noise(7, 5, seed=1)
    gate_up, down = noise(5, 12, 4, seed=2), noise(5, 4, 6, seed=3)

    found = mix_experts(x, *route(scores, experts), gate_up, down)

    for token in range(7):
        best = scores[token].softmax(-1).topk(2)
        weights = best.values / best.values.sum() if renormalize else best.values
        expected = torch.zeros(4)
        for weight, expert in zip(weights, best.indices, strict=True):
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            expected += weight * (down[expert] @ (F.silu(gate) * up))
        torch.testing.assert_close(found[token], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_experts_together_make_what_they_make_one_by_one(tokens: int, dtype: torch.dtype) -> None:
    # none for the last
    ids = torch.stack([(torch.arange(tokens) * 7) % 5, (torch.arange(tokens) * 7 + 2) % 5], -1)
    order = ids.flatten().argsort(stable=True)
    grouped = noise(tokens, 16).to(dtype)[order // 2]
    gate_up, down = noise(6, 48, 16, seed=2).to(dtype), noise(6, 16, 24, seed=3).to(dtype)

    torch.testing.assert_close(
        run_experts_grouped(grouped, ids, gate_up, down),
        run_experts_one_by_one(grouped, ids, gate_up, down),
    )


HOPPER, ADA = (9, 0), (8, 9)


@pytest.mark.parametrize(
    ("dtype", "shape", "capability", "wanted"),
    [
        (torch.bfloat16, (8, 48, 16), HOPPER, True),
        (torch.float16, (8, 48, 16), HOPPER, False),
        (torch.bfloat16, (8, 48, 16), ADA, False),
        (torch.bfloat16, (8, 40, 16), HOPPER, False),
        (torch.bfloat16, (8, 48, 12), HOPPER, False),
    ],
)
def test_groups_are_multiplied_together_where_torch_has_a_kernel_for_it(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    capability: tuple[int, int],
    wanted: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    on_device = Mock(is_cuda=True, dtype=dtype)

    assert has_grouped_mm(on_device, torch.empty(shape)) == wanted
    assert not has_grouped_mm(torch.empty(1, dtype=dtype), torch.empty(shape))


def test_experts_refuse_to_be_captured_before_they_ask_the_device_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_device = Mock(spec=("is_cuda",), is_cuda=True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="no graph holds these experts"):
        run_experts_one_by_one(on_device, on_device, on_device, on_device)
