"""Small models with random parameters, and a step of them by one set of operations or another.

Errors are relative to the largest expected number.
"""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from headstock.execution.kv_pools import page_shape, view_layer
from headstock.nn.decoder import forward
from headstock.nn.parameters import parameters
from headstock.ops.bound import BoundOps
from headstock.ops.torch_ops import TorchOps
from headstock.spi import (
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
    Weight,
)

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
    """The sizes of a model that its kernels depend on."""

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
    """Normal numbers that only depend on the seed."""
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
    """A separate slot for each token except the last two, which go to the dummy page, and the
    number of pages.
    """
    pages = 2 + -(-tokens // page_size)
    generator = torch.Generator().manual_seed(seed)
    slots = page_size + torch.randperm((pages - 1) * page_size, generator=generator)[:tokens]
    if tokens > 2:
        slots[-2:] = torch.tensor([0, 1 % page_size])
    return slots.to(device), pages


def positions_of(tokens: int, device: str) -> Tensor:
    """Random positions from 0 to 40,959."""
    return (torch.arange(tokens, device=device) * 7919 + 40_959) % 40_960


def error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest expected number."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    actual, expected = actual.float(), expected.float()
    assert bool((actual.isnan() == expected.isnan()).all()), "NaN in other places"
    worst = (actual - expected).nan_to_num_().abs().max() / expected.nan_to_num().abs().max().clamp(
        min=1e-30
    )
    return float(worst)


def within(worst: float, dtype: torch.dtype) -> float:
    """The error, if within the tolerance of the type."""
    assert worst <= LIMITS[dtype], (
        f"off by {worst:.2e} of the largest, {LIMITS[dtype]:.2e} is allowed"
    )
    return worst


def model_case(shape: Shape, tokens: int, dtype: torch.dtype, device: str, ops: Ops) -> float:
    """All layers without attention: hidden states and pools of `ops` and of torch.

    Errors of layers add up, so both are compared with float32. The error of `ops` may be as large
    as that of `torch` overall (root mean square, which no single number decides), and its worst
    number twice as far off as torch's.
    """
    config = config_of(shape)
    params = params_of(config, dtype, device)
    ours = run_model(ops, config, params, tokens, dtype, device)
    theirs = run_model(TorchOps(), config, params, tokens, dtype, device)
    wide = {
        name: Weight(
            tensor=each.tensor.float(), bias=None if each.bias is None else each.bias.float()
        )
        for name, each in params.items()
    }
    truth = run_model(TorchOps(), config, wide, tokens, torch.float32, device)
    for own, other, exact in zip(ours, theirs, truth, strict=True):
        mine, torchs = (
            (each.float() - exact).square().mean().sqrt() / exact.abs().max()
            for each in (own, other)
        )
        assert mine <= 1.02 * torchs + LIMITS[torch.float32], (
            f"{mine:.3e} from float32 on the whole, torch {torchs:.3e}"
        )
    worst, allowed = (
        max(error(f.float(), t) for f, t in zip(each, truth, strict=True))
        for each in (ours, theirs)
    )
    assert worst <= 2 * allowed + LIMITS[torch.float32], (
        f"{worst:.2e} from float32, torch {allowed:.2e}"
    )
    return worst


def run_model(
    ops: Ops, config: ModelConfig, params: Params, tokens: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, ...]:
    """Hidden states and pools of one step in which attention returns the queries."""
    batch = batch_of(config, tokens, dtype, device)
    with torch.inference_mode():
        bound = BoundOps(type(ops).__name__, ops, config)
        bound.bind(params, config)
        hidden = forward(params, config, batch, lambda q, layer: q, bound)
    if config.layers[0].experts is None:
        return hidden, *batch.pools
    # Padding is in the dummy page. Its results are up to each set, which may skip its experts.
    page_size = batch.pools[0].shape[2]
    return hidden[batch.slots[0] >= page_size], *(pool[1:] for pool in batch.pools)


def batch_of(
    config: ModelConfig, tokens: int, dtype: torch.dtype, device: str, page_size: int = 16
) -> Batch:
    """A step of tokens in separate slots, which are others in each KV group."""
    placed = [
        places(max(tokens, 1), page_size, device, number) for number in range(len(config.kv_groups))
    ]
    groups = [(layer.group, config.kv_groups[layer.group]) for layer in config.layers]
    pools = tuple(
        torch.zeros(
            (placed[number][1], *page_shape(group.layout, page_size)), dtype=dtype, device=device
        )
        for number, group in groups
    )
    return Batch(
        tokens=(torch.arange(tokens, device=device) * 37) % config.vocab,
        positions=positions_of(tokens, device),
        token_rows=torch.zeros(tokens, dtype=torch.int64, device=device),
        row_ids=torch.zeros(1, dtype=torch.int64, device=device),
        starts=torch.zeros(1, dtype=torch.int64, device=device),
        query_start=torch.tensor([0, tokens], dtype=torch.int32, device=device),
        max_query_len=tokens,
        slots=tuple(
            slots.masked_fill(slots < page_size, page_size)[:tokens] if tokens < 3 else slots
            for slots, _ in placed
        ),
        pools=pools,
        kv=tuple(
            view_layer(pool, number, group, page_size, dtype)
            for pool, (number, group) in zip(pools, groups, strict=True)
        ),
        logit_indices=None,
    )
