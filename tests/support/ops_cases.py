"""The kernels of `triton` beside the torch operations: on a GPU, or on a CPU by Triton's
interpreter.

Each function raises AssertionError or returns the largest error, as a share of the largest number
that is right.
"""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from headstock.execution.kv_pools import page_shape, view_layer
from headstock.nn.decoder import forward
from headstock.nn.kv import kv_cells
from headstock.nn.parameters import parameters
from headstock.nn.rope import CosSin, rope_table
from headstock.ops.bound import BoundOps
from headstock.ops.torch_ops import TorchOps
from headstock.spi import (
    Activation,
    Batch,
    Experts,
    FullKV,
    KVGroup,
    LayerConfig,
    ModelConfig,
    Ops,
    Params,
    QkNorm,
    Rope,
    Sampling,
    Weight,
)
from headstock_triton import activation, linear, norm
from headstock_triton.heads import rope_and_store_kv
from headstock_triton.ops import TritonOps

EPS = 1e-6
LIMITS = {
    torch.bfloat16: 2.0**-6,
    torch.float16: 2.0**-9,
    torch.float32: 2.0**-17,
    torch.float8_e4m3fn: 2.0**-3,
}
"""Two roundings of the largest number."""


@frozen(kw_only=True)
class Shape:
    """The numbers of a model that its kernels see."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    rope_dim: int | None = None
    qk_norm: bool = True
    bias: bool = False
    layers: int = 2
    experts: Experts | None = None


def config_of(shape: Shape) -> ModelConfig:
    """A decoder of that shape."""
    layers = tuple(
        LayerConfig(
            index=index,
            prefix=f"layers.{index}.",
            group=0,
            scale=shape.head_dim**-0.5,
            experts=shape.experts,
        )
        for index in range(shape.layers)
    )
    group = KVGroup(
        layers=tuple(range(shape.layers)),
        layout=FullKV(kv_heads=shape.kv_heads, k_dim=shape.head_dim, v_dim=shape.head_dim),
    )
    return ModelConfig(
        architecture="ops-case",
        vocab=shape.vocab,
        hidden=shape.hidden,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate=shape.intermediate,
        norm_eps=EPS,
        max_position=40_960,
        ropes=(Rope(theta=1e6, dim=shape.rope_dim or shape.head_dim),),
        layers=layers,
        kv_groups=(group,),
        qk_norm=QkNorm.HEAD if shape.qk_norm else QkNorm.NONE,
        qkv_bias=shape.bias,
        tied_embeddings=True,
    )


def noise(
    *shape: int, dtype: torch.dtype, device: str, seed: int = 0, scale: float = 1.0
) -> Tensor:
    """Normal numbers that depend on the seed alone."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).mul_(scale).to(dtype)


def params_of(config: ModelConfig, dtype: torch.dtype, device: str) -> Params:
    """Random parameters under which activations neither vanish nor grow much."""
    specs, params = parameters(config), {}
    for seed, (name, spec) in enumerate(specs.items()):
        if name.endswith(".bias"):
            continue
        if spec.compute is not None:
            params[name] = Weight(tensor=spec.compute(config, config.max_position).to(device))
            continue
        scale = 1.0 if len(spec.shape) == 1 or name.endswith("qk_norm") else spec.shape[-1] ** -0.5
        tensor = noise(*spec.shape, dtype=dtype, device=device, seed=seed, scale=scale)
        bias = specs.get(f"{name}.bias")
        held = (
            None
            if bias is None
            else noise(*bias.shape, dtype=dtype, device=device, seed=seed + 1000)
        )
        params[name] = Weight(tensor=tensor, bias=held)
    return params


def places(tokens: int, page_size: int, device: str, seed: int = 0) -> tuple[Tensor, int]:
    """A slot of its own for each token but the last two, which go to the dummy page, and how many
    pages there are.
    """
    pages = 2 + -(-tokens // page_size)
    generator = torch.Generator().manual_seed(seed)
    slots = page_size + torch.randperm((pages - 1) * page_size, generator=generator)[:tokens]
    if tokens > 2:
        slots[-2:] = torch.tensor([0, 1 % page_size])
    return slots.to(device), pages


def positions_of(tokens: int, device: str) -> Tensor:
    """Positions from 0 to 40,959, in no order."""
    return (torch.arange(tokens, device=device) * 7919 + 40_959) % 40_960


def error(found: Tensor, expected: Tensor) -> float:
    """The largest difference as a share of the largest number expected."""
    assert found.shape == expected.shape and found.dtype == expected.dtype
    found, expected = found.float(), expected.float()
    assert bool((found.isnan() == expected.isnan()).all()), "NaN in other places"
    worst = (found - expected).nan_to_num_().abs().max() / expected.nan_to_num().abs().max().clamp(
        min=1e-30
    )
    return float(worst)


def within(worst: float, dtype: torch.dtype) -> float:
    """The error, if the type allows it."""
    assert worst <= LIMITS[dtype], (
        f"off by {worst:.2e} of the largest, {LIMITS[dtype]:.2e} is allowed"
    )
    return worst


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
    """silu(gate) * up."""
    gate_up = noise(tokens, 2 * width, dtype=dtype, device=device, scale=4.0)
    return within(
        error(
            activation.fused_silu_and_mul(gate_up),
            TorchOps().activate_and_mul(gate_up, Activation.SILU),
        ),
        dtype,
    )


def linear_case(
    tokens: int, outs: int, width: int, dtype: torch.dtype, device: str, bias: bool
) -> float:
    """A product of a few tokens, against the same in float64."""
    x = noise(tokens, width, dtype=dtype, device=device)
    weight = noise(outs, width, dtype=dtype, device=device, seed=1, scale=width**-0.5)
    term = noise(outs, dtype=dtype, device=device, seed=2) if bias else None
    expected = x.double() @ weight.double().T + (0 if term is None else term)
    return within(error(linear.small_linear(x, weight, term), expected.to(dtype)), dtype)


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
        x, weight, term, norm=gain, eps=EPS, gated=gated, total=total, pdl=pdl
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
    q = rope_and_store_kv(qkv, weight, table, positions, slots, pool, heads=shape.heads, eps=EPS)

    view = qkv.clone().view(tokens, both + shape.kv_heads, shape.head_dim)
    qk = heads = view[:, :both]
    if weight is not None:
        heads = ops.head_norm(qk, Weight(tensor=weight), EPS)
    ops.rotate_(heads, CosSin.at_positions(table, positions, dtype), qk)
    kv = view[:, shape.heads :].view(tokens, 2, shape.kv_heads, shape.head_dim)
    ops.store_kv_(expected_pool, kv_cells(slots, page_size), kv)
    assert q.is_contiguous()
    written = within(error(pool, expected_pool), pool.dtype)
    return max(within(error(q, view[:, : shape.heads]), dtype), 0.0 if pool_dtype else written)


def model_case(
    shape: Shape, tokens: int, dtype: torch.dtype, device: str, ops: Ops | None = None
) -> float:
    """All layers, attention left out: hidden states and pools of `triton`, or of `ops`, and of
    torch.

    Errors of layers add up: what float32 says is the measure. From it `triton` may be as far as
    `torch` on the whole (root of the mean square, which no single number decides), and its worst
    number twice as far as torch's worst.
    """
    config = config_of(shape)
    params = params_of(config, dtype, device)
    ours = run_model(ops or TritonOps(), config, params, tokens, dtype, device)
    theirs = run_model(TorchOps(), config, params, tokens, dtype, device)
    wide = {
        name: Weight(
            tensor=each.tensor.float(), bias=None if each.bias is None else each.bias.float()
        )
        for name, each in params.items()
    }
    truth = run_model(TorchOps(), config, wide, tokens, torch.float32, device)
    for own, other, exact in zip(ours, theirs, truth, strict=True):
        mine, allowed = (
            (each.float() - exact).square().mean().sqrt() / exact.abs().max()
            for each in (own, other)
        )
        assert mine <= 1.02 * allowed + LIMITS[torch.float32], (
            f"{mine:.3e} from float32 on the whole, torch {allowed:.3e}"
        )
    found, allowed = (
        max(error(f.float(), t) for f, t in zip(each, truth, strict=True))
        for each in (ours, theirs)
    )
    assert found <= 2 * allowed + LIMITS[torch.float32], (
        f"{found:.2e} from float32, torch {allowed:.2e}"
    )
    return found


def run_model(
    ops: Ops, config: ModelConfig, params: Params, tokens: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, ...]:
    """Hidden states and pools of one step in which attention gives back the queries."""
    batch = batch_of(config, tokens, dtype, device)
    with torch.inference_mode():
        bound = BoundOps(type(ops).__name__, ops, config)
        hidden = forward(params, config, batch, lambda q, layer: q, bound)
    if config.layers[0].experts is None:
        return hidden, *batch.pools
    # Padding lies in the dummy page. What comes of it is left to each set, which may spare it the
    # experts.
    page_size = batch.pools[0].shape[2]
    return hidden[batch.slots[0] >= page_size], *(pool[1:] for pool in batch.pools)


def batch_of(
    config: ModelConfig, tokens: int, dtype: torch.dtype, device: str, page_size: int = 16
) -> Batch:
    """A step of tokens in slots of their own."""
    slots, pages = places(max(tokens, 1), page_size, device)
    group = config.kv_groups[0]
    pools = tuple(
        torch.zeros((pages, *page_shape(group.layout, page_size)), dtype=dtype, device=device)
        for _ in config.layers
    )
    return Batch(
        tokens=(torch.arange(tokens, device=device) * 37) % config.vocab,
        positions=positions_of(tokens, device),
        token_rows=torch.zeros(tokens, dtype=torch.int64, device=device),
        row_ids=torch.zeros(1, dtype=torch.int64, device=device),
        starts=torch.zeros(1, dtype=torch.int64, device=device),
        query_start=torch.tensor([0, tokens], dtype=torch.int32, device=device),
        max_query_len=tokens,
        slots=(slots.masked_fill(slots < page_size, page_size)[:tokens] if tokens < 3 else slots,),
        pools=pools,
        kv=tuple(view_layer(pool, 0, group, page_size, dtype) for pool in pools),
        logit_indices=None,
        sampling=Sampling(),
    )
