"""Configurations that each use one variant of operations, and a step of such a model."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from attrs import evolve, frozen
from torch import Tensor

from headstock.nn.draft_layers import DraftNames
from headstock.nn.parameters import LLAMA_NAMES, parameters
from headstock.spi import (
    Activation,
    ClampedGate,
    DeltaRule,
    Experts,
    FullKV,
    Head,
    KVGroup,
    LatentAttention,
    LayerSizes,
    ModelConfig,
    Ops,
    Params,
    ParamSpec,
    QkNorm,
    QueryScale,
    Role,
    Rope,
    Scoring,
    ShortConv,
    Weight,
)
from headstock_conformance.ops.cases import Shape, config_of, noise

SHAPE = Shape(
    hidden=64, heads=4, kv_heads=2, head_dim=32, intermediate=96, vocab=160, qk_norm=False, layers=3
)
WIDE = evolve(SHAPE, hidden=512, intermediate=600, layers=1)
"""Matrices large enough for sets that pack them."""
EPS = 0.3
"""Eps of norms: large enough that another one shows in every type."""
EXPERTS = Experts(count=6, per_token=2, intermediate=40, renormalize=True)


def make_plain() -> ModelConfig:
    """A plain decoder with norms of a large eps."""
    return evolve(config_of(SHAPE), norm_eps=EPS)


def make_deep() -> ModelConfig:
    """A plain decoder of many layers."""
    return evolve(config_of(evolve(SHAPE, layers=40)), norm_eps=EPS)


def with_experts(config: ModelConfig, experts: Experts) -> ModelConfig:
    """The decoder with mixtures of experts in all layers but the first."""
    first, *others = config.layers
    return evolve(config, layers=(first, *(evolve(each, experts=experts) for each in others)))


def list_configs() -> Mapping[str, ModelConfig]:
    """Variants of models with keys and values, by name."""
    plain = make_plain()
    layers = plain.layers
    ropes = (plain.ropes[0], Rope(theta=50.0, dim=plain.head_dim))
    mixed_ropes = tuple(
        evolve(layer, rope=rope) for layer, rope in zip(layers, (0, 1, None), strict=True)
    )
    return MappingProxyType(
        {
            "a plain decoder": plain,
            "wide maps": evolve(config_of(WIDE), norm_eps=EPS),
            "tied embeddings": evolve(plain, tied_embeddings=True),
            "untied embeddings": evolve(plain, tied_embeddings=False),
            "biases": evolve(plain, qkv_bias=True, out_bias=True, mlp_bias=True),
            "norms of each head": evolve(plain, qk_norm=QkNorm.HEAD),
            "norms of all heads": evolve(plain, qk_norm=QkNorm.WHOLE),
            "norms of values": evolve(plain, qk_norm=QkNorm.HEAD, value_norm=True),
            "norms in float32": evolve(plain, wide_norms=True),
            "norms with an offset": evolve(plain, norm_offset=True),
            "norms after each part": evolve(plain, post_norm=True),
            "norms after each part alone": evolve(plain, pre_norm=False, post_norm=True),
            "scaled embeddings and residuals": evolve(
                plain, embedding_scale=3.0, residual_scale=0.5
            ),
            "queries scaled by position": evolve(plain, query_scale=QueryScale(rate=0.5, length=2)),
            "keys and values divided by scales": evolve(
                plain,
                layers=tuple(
                    evolve(layer, k_scale=0.25 + layer.index, v_scale=3.0) for layer in layers
                ),
            ),
            "attention times a gate": evolve(
                plain, layers=tuple(evolve(layer, has_gate=True) for layer in layers)
            ),
            "gelu": evolve(plain, activation=Activation.GELU),
            "gelu by tanh": evolve(plain, activation=Activation.GELU_TANH),
            "a part of each head turned": evolve(plain, ropes=(Rope(theta=1e4, dim=16),)),
            "layers times a number": evolve(
                plain,
                layers=tuple(evolve(layer, scalar=f"{layer.prefix}scalar") for layer in layers),
            ),
            "layers of different sizes": make_unequal_config(),
            "several ropes, and none": evolve(plain, ropes=ropes, layers=mixed_ropes),
            "scaled and bounded scores": evolve(plain, head=Head(scale=0.5, softcap=2.0)),
            "experts": with_experts(plain, EXPERTS),
            "experts weighed as they are": with_experts(plain, evolve(EXPERTS, renormalize=False)),
            "a shared expert": with_experts(plain, evolve(EXPERTS, shared=24, shared_gate=True)),
            "experts times numbers beside a dense part": evolve(
                with_experts(plain, evolve(EXPERTS, has_scales=True, beside_mlp=True)),
                post_norm=True,
            ),
            "experts with biases and a bounded gate": with_experts(
                plain,
                evolve(EXPERTS, score_bias=True, bias=True, gate=ClampedGate(limit=0.5, slope=1.7)),
            ),
            "experts chosen with a bias, by groups": with_experts(
                plain,
                evolve(
                    EXPERTS,
                    choice_bias=True,
                    scoring=Scoring.SIGMOID,
                    wide_scores=True,
                    groups=3,
                    groups_per_token=2,
                    group_best=2,
                    scale=1.5,
                ),
            ),
        }
    )


def make_unequal_config() -> ModelConfig:
    """Fewer and wider heads, a KV group and a narrower feed-forward part in the second layer."""
    plain = make_plain()
    sizes = LayerSizes(heads=2, kv_heads=1, head_dim=64, intermediate=56)
    first, second, third = plain.layers
    full = FullKV(kv_heads=plain.kv_heads, k_dim=plain.head_dim, v_dim=plain.head_dim)
    wide = FullKV(kv_heads=sizes.kv_heads, k_dim=sizes.head_dim, v_dim=sizes.head_dim)
    return evolve(
        plain,
        qk_norm=QkNorm.HEAD,
        ropes=(*plain.ropes, Rope(theta=50.0, dim=48)),
        layers=(first, evolve(second, group=1, rope=1, sizes=sizes), third),
        kv_groups=(KVGroup(layers=(0, 2), layout=full), KVGroup(layers=(1,), layout=wide)),
    )


def make_latent_config() -> ModelConfig:
    """Attention over latent vectors."""
    latent = LatentAttention(q_rank=20, kv_rank=24, nope_dim=12, rope_dim=8, v_dim=10, norm_eps=EPS)
    plain = make_plain()
    return evolve(
        plain,
        kv_heads=1,
        head_dim=latent.layout.dim,
        ropes=(Rope(theta=1e4, dim=latent.rope_dim),),
        layers=tuple(evolve(layer, latent=latent) for layer in plain.layers),
        kv_groups=(KVGroup(layers=(0, 1, 2), layout=latent.layout),),
    )


def make_state_config() -> ModelConfig:
    """A gated convolution in the first and last layer."""
    return _keep_states(ShortConv(taps=3, width=SHAPE.hidden, bias=True))


def make_delta_config() -> ModelConfig:
    """A gated delta rule in the first and last layer, each key head for three value heads."""
    return _keep_states(DeltaRule(key_heads=2, value_heads=6, key_dim=16, value_dim=20, taps=4))


def _keep_states(part: ShortConv | DeltaRule) -> ModelConfig:
    """A plain decoder with this instead of attention in the first and last layer."""
    plain = make_plain()
    kept = {"conv": part} if isinstance(part, ShortConv) else {"delta": part}
    layers = tuple(
        evolve(layer, group=1, **kept) if layer.index != 1 else layer for layer in plain.layers
    )
    full = FullKV(kv_heads=plain.kv_heads, k_dim=plain.head_dim, v_dim=plain.head_dim)
    groups = (KVGroup(layers=(1,), layout=full), KVGroup(layers=(0, 2), layout=part.layout))
    return evolve(plain, layers=layers, kv_groups=groups)


@frozen(eq=False)
class Weights:
    """The parameters of a model as loaded, before `Ops.prepare`."""

    specs: Mapping[str, ParamSpec]
    params: Params

    def prepare(self, ops: Ops) -> Params:
        """The parameters as prepared by the set of operations from copies."""
        return {
            name: ops.prepare(self.specs[name], copy_weight(weight))
            for name, weight in self.params.items()
        }

    def multiply_norms(self, gain: float) -> Weights:
        """The same weights, except those of norms."""
        return Weights(
            self.specs,
            {
                name: evolve(weight, tensor=weight.tensor * gain)
                if Role.NORM in self.specs[name].roles
                else weight
                for name, weight in self.params.items()
            },
        )

    def widen(self) -> Weights:
        """The same numbers in float32."""
        return Weights(self.specs, {name: to_float(each) for name, each in self.params.items()})


def copy_weight(weight: Weight) -> Weight:
    """A weight with copies of the tensors."""
    bias = None if weight.bias is None else weight.bias.clone()
    return evolve(weight, tensor=weight.tensor.clone(), bias=bias)


def to_float(weight: Weight) -> Weight:
    """The weight in float32."""
    bias = None if weight.bias is None else weight.bias.float()
    return evolve(weight, tensor=weight.tensor.float(), bias=bias)


def draw_weights(
    config: ModelConfig,
    dtype: torch.dtype,
    device: str,
    declared: Mapping[str, ParamSpec] | None = None,
) -> Weights:
    """Random parameters under which activations neither vanish nor grow much.

    declared: the parameters of a family; those of the decoder by default
    """
    names = evolve(LLAMA_NAMES, drafts=DraftNames() if config.draft_layers else None)
    specs, params = dict(parameters(config, names) if declared is None else declared), {}
    for seed, (name, spec) in enumerate(specs.items()):
        if name.endswith(".bias"):
            continue
        bias = specs.get(f"{name}.bias")
        held = None if bias is None else draw_tensor(config, bias, dtype, device, seed + 1000)
        tensor = draw_tensor(config, spec, dtype, device, seed)
        params[name] = Weight(tensor=tensor, bias=held)
    return Weights(specs, params)


def draw_tensor(
    config: ModelConfig, spec: ParamSpec, dtype: torch.dtype, device: str, seed: int
) -> Tensor:
    """One parameter, of its own type if it has one."""
    if spec.compute is not None:
        return spec.compute(config, config.max_position).to(device)
    own = dtype if spec.dtype is None else getattr(torch, spec.dtype)
    is_gain = bool(spec.roles & {Role.NORM, Role.HEAD_NORM}) or len(spec.shape) == 1
    scale = 0.5 if is_gain else spec.shape[-1] ** -0.5
    drawn = noise(*spec.shape, dtype=torch.float32, device=device, seed=seed, scale=scale)
    return (drawn + 1 if is_gain else drawn).to(own)
