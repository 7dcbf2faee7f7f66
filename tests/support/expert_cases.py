"""Mixtures of experts by the kernels of `triton` beside torch in float32: on a GPU, or on a CPU by
the interpreter.

Each case raises AssertionError or returns the largest error, as a share of the largest number that
is right.
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import evolve, frozen
from ops_cases import error, noise, within
from torch import Tensor

from headstock.nn import moe
from headstock.nn.mlp import activate_and_mul
from headstock.spi import Activation, ClampedGate, Experts, Weight, WeightFormat, WeightKind
from headstock.weights import dequantize_
from headstock_triton.experts import fused_mix_experts, mix_chosen_experts, mix_experts
from headstock_triton.packed import MOST_TOKENS, prepare_experts
from headstock_triton.tiles import RowTile, Tile, Tiles, choose_rounded

SMALL = Tile(n=16, k=32)
WIDE = Tile(n=64, k=64)
WAYS: dict[str, RowTile | Tiles] = {
    "rows": RowTile(gate_up=32, down=32),
    "tiles": Tiles(rows=16, gate_up=SMALL, down=evolve(SMALL, n=32, group=2)),
    "swapped": Tiles(
        rows=16, gate_up=evolve(SMALL, n=32, swap=True), down=evolve(SMALL, n=64, swap=True)
    ),
    "tma": Tiles(
        rows=32, gate_up=evolve(SMALL, tma=True, group=2), down=evolve(SMALL, n=32, tma=True)
    ),
    "wide": Tiles(rows=16, gate_up=WIDE, down=WIDE),
}


@frozen(kw_only=True)
class Mixture:
    """Sizes of a layer's experts and how many tokens they get."""

    tokens: int
    count: int
    chosen: int
    hidden: int = 48
    inters: int = 40
    renormalize: bool = True

    @property
    def experts(self) -> Experts:
        """As a layer's configuration has it."""
        return Experts(
            count=self.count,
            per_token=self.chosen,
            intermediate=self.inters,
            renormalize=self.renormalize,
        )


def draw_weights(case: Mixture, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Those of all experts, gate and up in one."""
    gate_up = noise(
        case.count,
        2 * case.inters,
        case.hidden,
        dtype=dtype,
        device=device,
        scale=case.hidden**-0.5,
    )
    down = noise(
        case.count,
        case.hidden,
        case.inters,
        dtype=dtype,
        device=device,
        seed=1,
        scale=case.inters**-0.5,
    )
    return gate_up, down


def draw_tokens(
    case: Mixture, dtype: torch.dtype, device: str, seed: int = 2
) -> tuple[Tensor, Tensor]:
    """Hidden states, and scores that no type rounds to the same number: which experts are best is
    never a tie.
    """
    x = noise(case.tokens, case.hidden, dtype=dtype, device=device, seed=seed)
    ranks = torch.rand(
        case.tokens, case.count, generator=torch.Generator().manual_seed(seed)
    ).argsort(-1)
    return x, ((ranks - case.count // 2) / 16).to(dtype).to(device)


def mix_exactly(case: Mixture, x: Tensor, scores: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The mixture by torch in float32, in the dtype of `x`."""
    weights, ids = moe.route(scores.float(), case.experts)
    return moe.mix_experts(x.float(), weights, ids, gate_up.float(), down.float()).to(x.dtype)


ROUNDED = 2.0
"""How much farther off experts of rounded tokens may be: 1.2 on an H200, where tokens that are not
rounded would be 2.7 times as far off.
"""


def mix_rounded(
    x: Tensor,
    shares: Tensor,
    ids: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: Activation | ClampedGate = Activation.SILU,
) -> Tensor:
    """As `moe.mix_experts` of shards, in float32, where rows are rounded to FP8 before products.

    What is between the products has other bits in kernels, and a few of its numbers become the
    next one of FP8 there: `ROUNDED` is for these.

    x: [tokens, hidden] bfloat16    shares, ids: [tokens, per_token]
    """
    found = torch.zeros(*ids.shape, x.shape[1], device=x.device)
    rounded = _round_rows(x)
    for expert in range(len(gate_up)):
        token, slot = (ids == expert).nonzero().T
        inner = activate_and_mul(rounded[token] @ gate_up[expert].T, activation)
        found[token, slot] = _round_rows(inner.to(x.dtype)) @ down[expert].T
    return (found * shares.float()[..., None]).sum(1)


def _round_rows(x: Tensor) -> Tensor:
    """Rows of numbers that FP8 has with a scale for each row."""
    scale = x.float().abs().amax(1, keepdim=True).clamp(min=1e-30) / 448
    return (x.float() / scale).to(torch.float8_e4m3fn).float() * scale


def _is_rounded(case: Mixture, x: Tensor, format: WeightFormat | None, way: object) -> bool:
    """Whether kernels round the case's tokens: many, on GPUs, for experts in FP8."""
    is_fp8 = format is not None and format.kind is WeightKind.FP8_E4M3
    if not (is_fp8 and x.is_cuda and x.dtype is torch.bfloat16 and way is None):
        return False
    shape = (case.count, case.chosen, case.hidden, case.inters)
    return case.tokens > MOST_TOKENS and choose_rounded(case.tokens, shape) is not None


def mixture_case(
    case: Mixture, dtype: torch.dtype, device: str, way: RowTile | Tiles | None, **more: Any
) -> float:
    """All tokens choose among all experts."""
    (gate_up, down), (x, scores) = (
        draw_weights(case, dtype, device),
        draw_tokens(case, dtype, device),
    )
    expected = mix_exactly(case, x, scores, gate_up, down)
    found = fused_mix_experts(x, scores, case.experts, gate_up, down, tiles=way, **more)
    return within(error(found, expected), dtype)


FOUR_BITS = (WeightKind.INT4, WeightKind.FP4_E2M1)


def pack_experts(
    tensor: Tensor, format: WeightFormat, device: str, *, by_powers: bool = True
) -> tuple[Weight, Tensor]:
    """Experts in 8 or 4 bits, whose scales differ, and the numbers that these stand for in float32.

    by_powers: whether scales of FP4 are powers of two
    """
    assert format.group is not None
    rows, columns = format.group
    count, outs, width = tensor.shape
    groups = (count, -(-outs // rows), -(-width // columns))
    generator = torch.Generator().manual_seed(outs)
    scales = ((0.5 + torch.rand(groups, generator=generator)) / 8).to(device)
    zeros = None
    if format.kind in FOUR_BITS:
        if format.kind is WeightKind.FP4_E2M1 and by_powers:
            scales = scales.log2().round().exp2()
        elif format.has_zeros:
            scales = scales.to(torch.float16).float()
            zeros = torch.randint(0, 17, groups, generator=generator).to(torch.int8).to(device)
        drawn = torch.randint(0, 256, (count, outs, width // 2), generator=generator)
        numbers = drawn.to(torch.uint8).to(device)
    else:
        kept = torch.float8_e4m3fn if format.kind is WeightKind.FP8_E4M3 else torch.int8
        noised = (tensor.float() * 8).clamp(-127, 127)
        numbers = (noised if kept.is_floating_point else noised * 16).to(kept)
    packed = Weight(tensor=numbers, scales=scales, zeros=zeros, format=format)
    plain = torch.empty(tensor.shape, device=device)
    dequantize_(packed, plain)
    return prepare_experts(packed), plain


def packed_case(
    case: Mixture,
    format: WeightFormat,
    dtype: torch.dtype,
    device: str,
    way: RowTile | Tiles | None,
    *,
    by_powers: bool = True,
) -> float:
    """Packed experts beside the numbers that these stand for."""
    both = [
        pack_experts(tensor, format, device, by_powers=by_powers)
        for tensor in draw_weights(case, dtype, device)
    ]
    packed, plain = zip(*both, strict=True)
    x, scores = draw_tokens(case, dtype, device)
    found = mix_experts(x, scores, case.experts, *packed, tiles=way)
    if _is_rounded(case, x, format, way):
        expected = mix_rounded(x, *moe.route(scores.float(), case.experts), *plain).to(dtype)
        return within(error(found, expected) / ROUNDED, dtype)
    return within(error(found, mix_exactly(case, x, scores, *plain)), dtype)


GATES: dict[str, Activation | ClampedGate] = {
    "silu": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_tanh": Activation.GELU_TANH,
    # Its bounds cut a third of the numbers.
    "clamped": ClampedGate(limit=0.6, slope=1.702),
}


def chosen_case(
    case: Mixture,
    dtype: torch.dtype,
    device: str,
    way: RowTile | Tiles | None,
    gate: str,
    *,
    has_biases: bool,
    format: WeightFormat | None = None,
) -> float:
    """Experts that were chosen before, one of ten no expert of the rank; two tokens are padding."""
    weights, plain = [], []
    for seed, tensor in enumerate(draw_weights(case, dtype, device)):
        bias = noise(*tensor.shape[:2], dtype=dtype, device=device, seed=seed + 5)
        each, numbers = Weight(tensor=tensor), tensor.float()
        if format is not None:
            each, numbers = pack_experts(tensor, format, device)
        weights.append(evolve(each, bias=bias if has_biases else None))
        plain.append(numbers)
    x, scores = draw_tokens(case, dtype, device)
    shares, ids = moe.route(scores, case.experts)
    drawn = torch.rand(ids.shape, generator=torch.Generator().manual_seed(3))
    ids = ids.masked_fill((drawn < 0.1).to(device), case.count)
    slots = torch.arange(case.tokens, device=device) * 2
    found = mix_chosen_experts(
        x, shares, ids, *weights, GATES[gate], slots=slots, page_size=3, tiles=way
    )
    assert not found[:2].any(), "padding gets no expert"
    if _is_rounded(case, x, format, way):
        assert not has_biases, "not tried with biases"
        expected = mix_rounded(x, shares, ids, *plain, GATES[gate])
        return within(error(found[2:], expected[2:].to(dtype)) / ROUNDED, dtype)
    biases = [each.bias for each in weights]
    exact = moe.mix_experts(
        x.float(),
        shares.float(),
        ids,
        *plain,
        GATES[gate],
        biases=(biases[0].float(), biases[1].float())
        if biases[0] is not None and biases[1] is not None
        else None,
        is_shard=True,
    )
    return within(error(found[2:], exact[2:].to(dtype)), dtype)


def shard_case(
    case: Mixture, dtype: torch.dtype, device: str, way: RowTile | Tiles, ranks: int = 2
) -> float:
    """Each rank has some of the experts, and their parts sum up to what all experts make."""
    (gate_up, down), (x, scores) = (
        draw_weights(case, dtype, device),
        draw_tokens(case, dtype, device),
    )
    slots = torch.arange(1, case.tokens + 1, device=device)
    slots[0] = 0  # padding, in the dummy page
    held = -(-case.count // ranks)
    total = torch.zeros_like(x, dtype=torch.float32)
    for first in range(0, case.count, held):
        part = slice(first, first + held)
        experts = evolve(case.experts, first=first, held=held)
        # Of the last rank some experts are padded, and no token is given to those.
        own = [
            torch.nn.functional.pad(each[part], (0, 0, 0, 0, 0, held - len(each[part])))
            for each in (gate_up, down)
        ]
        found = fused_mix_experts(x, scores, experts, *own, slots=slots, page_size=1, tiles=way)
        assert not found[0].any()
        total += found.float()
        weights, ids = moe.route(scores.float(), case.experts)
        numbers = moe.number_own_experts(ids, experts)
        wide = (each.float() for each in own)
        alone = moe.mix_experts(x.float(), weights, numbers, *wide, is_shard=True)
        within(error(found[1:], alone[1:].to(dtype)), dtype)
    expected = mix_exactly(case, x, scores, gate_up, down)
    return within(error(total[1:].to(dtype), expected[1:]), dtype)


def one_expert_case(case: Mixture, dtype: torch.dtype, device: str, way: RowTile | Tiles) -> float:
    """All tokens choose the same experts, one of which outweighs the rest."""
    (gate_up, down), (x, scores) = (
        draw_weights(case, dtype, device),
        draw_tokens(case, dtype, device),
    )
    scores = scores[:1].expand(case.tokens, -1).clone()
    scores[:, case.count - 1] = 20.0
    expected = mix_exactly(case, x, scores, gate_up, down)
    return within(
        error(fused_mix_experts(x, scores, case.experts, gate_up, down, tiles=way), expected), dtype
    )


def padding_case(case: Mixture, dtype: torch.dtype, device: str, way: RowTile | Tiles) -> float:
    """Every third token is padding: 0 comes of it, whatever it holds, and the others are as if it
    were none.
    """
    (gate_up, down), (x, scores) = (
        draw_weights(case, dtype, device),
        draw_tokens(case, dtype, device),
    )
    alone = fused_mix_experts(x, scores, case.experts, gate_up, down, tiles=way)
    token = torch.arange(case.tokens, device=device)
    slots = torch.where(token % 3 == 0, token % 4, 3 + token)  # from the first of page 1
    padding = token % 3 == 0
    x[padding], scores[padding] = torch.nan, torch.nan
    found = fused_mix_experts(
        x, scores, case.experts, gate_up, down, slots=slots, page_size=4, tiles=way
    )
    assert torch.equal(found[~padding], alone[~padding]), "padding changed other tokens"
    assert bool((found[padding] == 0).all()), "padding is not 0"
    return 0.0


def nan_case(case: Mixture, dtype: torch.dtype, device: str, way: RowTile | Tiles) -> float:
    """A token of NaN, and one whose scores are NaN: NaN comes of both, and nothing of it reaches
    the others.
    """
    (gate_up, down), (x, scores) = (
        draw_weights(case, dtype, device),
        draw_tokens(case, dtype, device),
    )
    sound = fused_mix_experts(x, scores, case.experts, gate_up, down, tiles=way)
    x[1], scores[-1] = torch.nan, torch.nan
    found = fused_mix_experts(x, scores, case.experts, gate_up, down, tiles=way)
    assert torch.equal(found[2:-1], sound[2:-1]) and torch.equal(found[0], sound[0]), (
        "NaN reached other tokens"
    )
    assert bool(found[[1, -1]].isnan().all()), "NaN was lost"
    return 0.0


def neighbour_case(case: Mixture, dtype: torch.dtype, device: str, way: RowTile | Tiles) -> float:
    """A token's result is the same, bit by bit, at another place among other tokens."""
    gate_up, down = draw_weights(case, dtype, device)
    x, scores = draw_tokens(case, dtype, device)
    others, other_scores = draw_tokens(case, dtype, device, seed=3)
    others[-1], other_scores[-1] = x[0], scores[0]
    first, last = (
        fused_mix_experts(tokens, each, case.experts, gate_up, down, tiles=way)
        for tokens, each in ((x, scores), (others, other_scores))
    )
    assert torch.equal(first[0], last[-1]), "a token depends on its neighbours"
    return 0.0


CASES = (one_expert_case, padding_case, nan_case, neighbour_case)
