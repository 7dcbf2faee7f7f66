"""The kernels of `triton` beside the torch operations: on a GPU, or on a CPU by Triton's
interpreter.

Each function raises AssertionError or returns the largest error, as a share of the largest number
that is right.
"""

from __future__ import annotations

import torch

from headstock.nn.kv import divide_by_scales, kv_cells
from headstock.nn.rope import CosSin, rope_table
from headstock.ops.torch_ops import TorchOps
from headstock.spi import Activation, Ops, Rope, Stream, Weight
from headstock_conformance.ops import cases
from headstock_conformance.ops.cases import (
    EPS,
    LIMITS,
    Shape,
    batch_of,
    config_of,
    error,
    noise,
    params_of,
    places,
    positions_of,
    run_model,
    within,
)
from headstock_triton import few_linear, gated_linear, linear, norm, split_linear
from headstock_triton.gated_linear import GatedTile
from headstock_triton.heads import rope_and_store_kv
from headstock_triton.ops import TritonOps
from headstock_triton.split_linear import SplitTile
from headstock_triton.split_sums import PartTile

__all__ = [
    "EPS",
    "LIMITS",
    "Shape",
    "activation_case",
    "batch_of",
    "config_of",
    "embed_case",
    "error",
    "few_case",
    "fused_linear_case",
    "gated_case",
    "heads_case",
    "linear_case",
    "model_case",
    "noise",
    "norm",
    "norm_case",
    "params_of",
    "places",
    "positions_of",
    "run_model",
    "split_case",
    "within",
]


def norm_case(tokens: int, hidden: int, dtype: torch.dtype, device: str, pending: bool) -> float:
    """Norm, with or without a sum before it."""
    total, term, weight = (
        noise(*each, dtype=dtype, device=device, seed=seed)
        for seed, each in enumerate(((tokens, hidden), (tokens, hidden), (hidden,)))
    )
    expected = total + term if pending else total.clone()
    normed = norm.add_norm(total, term if pending else None, weight, EPS)
    assert torch.equal(total, expected)
    return within(error(normed, TorchOps().rms_norm(expected, Weight(tensor=weight), EPS)), dtype)


def embed_case(tokens: int, hidden: int, dtype: torch.dtype, device: str) -> float:
    """Embeddings with the first norm."""
    table, weight = (
        noise(101, hidden, dtype=dtype, device=device),
        noise(hidden, dtype=dtype, device=device, seed=1),
    )
    ids = (torch.arange(tokens, device=device) * 37) % 101
    total, normed = norm.embed_norm(ids, table, weight, EPS)
    assert torch.equal(total, table[ids])
    return within(error(normed, TorchOps().rms_norm(table[ids], Weight(tensor=weight), EPS)), dtype)


def activation_case(tokens: int, width: int, dtype: torch.dtype, device: str) -> float:
    """silu(gate) * up, of rows that lie together and of those that do not; gelu by torch."""
    wide = noise(tokens, 2 * width + 1, dtype=dtype, device=device, scale=4.0)
    ops, errors = TritonOps(), []
    for gate_up in (wide[:, 1:].contiguous(), wide[:, 1:]):
        for kind in (Activation.SILU, Activation.GELU_TANH):
            expected = TorchOps().activate_and_mul(gate_up, kind)
            errors.append(error(ops.activate_and_mul(gate_up, kind), expected))
    return within(max(errors), dtype)


def linear_case(
    tokens: int, outs: int, width: int, dtype: torch.dtype, device: str, bias: bool
) -> float:
    """A product of a few tokens, against the same in float64."""
    x = noise(tokens, width, dtype=dtype, device=device)
    weight = noise(outs, width, dtype=dtype, device=device, seed=1, scale=width**-0.5)
    term = noise(outs, dtype=dtype, device=device, seed=2) if bias else None
    expected = x.double() @ weight.double().T + (0 if term is None else term)
    return within(
        error(linear.small_linear(x, Weight(tensor=weight, bias=term)), expected.to(dtype)), dtype
    )


def few_case(
    tokens: int,
    outs: int,
    width: int,
    dtype: torch.dtype,
    device: str,
    tile: PartTile | None = None,
    *,
    bias: bool = False,
    pdl: bool = False,
) -> float:
    """A product of a few tokens whose depth programs share, twice by the same counters."""
    x = noise(tokens, width, dtype=dtype, device=device)
    weight = noise(outs, width, dtype=dtype, device=device, seed=1, scale=width**-0.5)
    term = noise(outs, dtype=dtype, device=device, seed=2) if bias else None
    counters = torch.zeros(few_linear.count_tiles(outs), dtype=torch.int32, device=device)
    expected = x.double() @ weight.double().T + (0 if term is None else term)
    found, again = (
        few_linear.multiply_few(x, Weight(tensor=weight, bias=term), counters, tile=tile, pdl=pdl)
        for _ in range(2)
    )
    assert torch.equal(found, again) and not counters.any(), "a counter was not set back"
    return within(error(found, expected.to(dtype)), dtype)


def split_case(
    tokens: int, outs: int, width: int, dtype: torch.dtype, device: str, tile: SplitTile
) -> float:
    """A product in parts that the next norm sums, against torch's operations one by one."""
    ops = TorchOps()
    x = noise(tokens, width, dtype=dtype, device=device)
    weight = noise(outs, width, dtype=dtype, device=device, seed=1, scale=width**-0.5)
    gain = noise(outs, dtype=dtype, device=device, seed=3)
    total = noise(tokens, outs, dtype=dtype, device=device, seed=4)
    expected = total + (x.double() @ weight.double().T).to(dtype)
    parts = split_linear.multiply_in_parts(x, Weight(tensor=weight), tile)
    assert parts.shape == (tile.parts, tokens, outs) and parts.dtype == torch.float32
    settled = Stream(total.clone(), parts).settle()
    normed = norm.add_norm(total, parts, gain, EPS)
    within(error(total, settled), dtype)
    within(error(total, expected), dtype)
    return within(error(normed, ops.rms_norm(expected, Weight(tensor=gain), EPS)), dtype)


def gated_case(
    tokens: int,
    outs: int,
    width: int,
    dtype: torch.dtype,
    device: str,
    tile: SplitTile | GatedTile,
) -> float:
    """Gate and up in one product with the activation, against the same one by one."""
    x = noise(tokens, width, dtype=dtype, device=device)
    weight = noise(2 * outs, width, dtype=dtype, device=device, seed=1, scale=width**-0.5)
    product = (x.double() @ weight.double().T).to(dtype)
    expected = TorchOps().activate_and_mul(product, Activation.SILU)
    if isinstance(tile, SplitTile):
        found = split_linear.multiply_gated(x, Weight(tensor=weight), tile)
    else:
        found = gated_linear.multiply_gated_tiles(x, weight, tile)
    return within(error(found, expected), dtype)


def fused_linear_case(
    tokens: int,
    outs: int,
    width: int,
    dtype: torch.dtype,
    device: str,
    *,
    normed: bool = False,
    gated: bool = False,
    added: bool = False,
    bias: bool = False,
    pdl: bool = False,
) -> float:
    """A product with what lies before and after it, against torch's operations one by one."""
    ops = TorchOps()
    rows = outs * (2 if gated else 1)
    x = noise(tokens, width, dtype=dtype, device=device)
    weight = noise(rows, width, dtype=dtype, device=device, seed=1, scale=width**-0.5)
    term = noise(rows, dtype=dtype, device=device, seed=2) if bias else None
    gain = noise(width, dtype=dtype, device=device, seed=3) if normed else None
    total = noise(tokens, outs, dtype=dtype, device=device, seed=4) if added else None
    value = x if gain is None else ops.rms_norm(x, Weight(tensor=gain), EPS)
    product = value.double() @ weight.double().T + (0 if term is None else term)
    expected = product.to(dtype)
    if gated:
        expected = ops.activate_and_mul(expected, Activation.SILU)
    if total is not None:
        expected = total + expected
    kept = x.clone()
    found = linear.small_linear(
        x, Weight(tensor=weight, bias=term), norm=gain, eps=EPS, gated=gated, total=total, pdl=pdl
    )
    assert torch.equal(x, kept) and (total is None or found is total)
    return within(error(found, expected), dtype)


def heads_case(
    shape: Shape,
    tokens: int,
    dtype: torch.dtype,
    device: str,
    *,
    page_size: int = 16,
    pool_dtype: torch.dtype | None = None,
    scales: tuple[float, float] = (1.0, 1.0),
) -> float:
    """Norms of heads, rotation and store; nothing else of the pool is written."""
    ops, both = TorchOps(), shape.heads + shape.kv_heads
    slots, pages = places(tokens, page_size, device)
    positions = positions_of(tokens, device)
    table = rope_table(Rope(theta=1e6, dim=shape.rope_dim or shape.head_dim), 40_960, 40_960).to(
        device
    )
    qkv = noise(
        tokens, (both + shape.kv_heads) * shape.head_dim, dtype=dtype, device=device, scale=3.0
    )
    weight = (
        noise(both, shape.head_dim, dtype=dtype, device=device, seed=1) if shape.qk_norm else None
    )
    pool = torch.full(
        (pages, 2, page_size, shape.kv_heads, shape.head_dim), 7.0, dtype=dtype, device=device
    ).to(pool_dtype or dtype)
    expected_pool = pool.clone()
    q = rope_and_store_kv(
        qkv,
        weight,
        table,
        positions,
        slots,
        pool,
        heads=shape.heads,
        eps=EPS,
        k_scale=scales[0],
        v_scale=scales[1],
    )

    view = qkv.clone().view(tokens, both + shape.kv_heads, shape.head_dim)
    qk = heads = view[:, :both]
    if weight is not None:
        heads = ops.head_norm(qk, Weight(tensor=weight), EPS)
    ops.rotate_(heads, CosSin.at_positions(table, positions, dtype), qk)
    kv = view[:, shape.heads :].view(tokens, 2, shape.kv_heads, shape.head_dim)
    if scales != (1.0, 1.0):
        kv = divide_by_scales(kv, *scales)
    ops.store_kv_(expected_pool, kv_cells(slots, page_size), kv)
    assert q.is_contiguous()
    written = within(error(pool, expected_pool), pool.dtype)
    return max(within(error(q, view[:, : shape.heads]), dtype), 0.0 if pool_dtype else written)


def model_case(
    shape: Shape, tokens: int, dtype: torch.dtype, device: str, ops: Ops | None = None
) -> float:
    """All layers by `triton`, or by `ops`, beside torch's; see `cases.model_case`."""
    return cases.model_case(shape, tokens, dtype, device, ops or TritonOps())
