"""A decoder with all that the contract lets one ask for: each field changes what it computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import torch

from headstock.nn.decoder import decoder
from headstock.nn.parameters import parameters
from headstock.ops.torch_ops import TorchOps
from headstock.selection.model_needs import resolve_model_dtype
from headstock.spi import (
    Activation,
    Attend,
    ClampedGate,
    Collectives,
    DeltaRule,
    DeviceEnv,
    Experts,
    Feature,
    FullKV,
    Head,
    KVGroup,
    LatentAttention,
    LatentKV,
    LayerConfig,
    LayerSizes,
    Model,
    ModelConfig,
    Params,
    ParamSpec,
    QkNorm,
    QueryScale,
    Rope,
    Scoring,
    Shard,
    ShortConv,
    Stream,
    Weight,
)
from headstock.startup.kv_groups import find_group_fault
from headstock.weights import load_weights
from headstock_conformance.model.paged import Paged

from . import terms
from .vary import Case, vary

LAYOUT = FullKV(kv_heads=2, k_dim=8, v_dim=8)
EXPERTS = Experts(
    count=12,
    per_token=2,
    intermediate=8,
    renormalize=True,
    norm_floor=1.5,
    choice_bias=True,
    shared=8,
    shared_gate=True,
    scoring=Scoring.SIGMOID,
    groups=4,
    groups_per_token=1,
    group_best=2,
    scale=0.7,
    score_bias=True,
    bias=True,
    gate=ClampedGate(limit=0.3, slope=2.0),
)
CONV = ShortConv(taps=3, width=16, bias=True)
DELTA = DeltaRule(key_heads=2, value_heads=4, key_dim=4, value_dim=6, taps=3)
LAYERS = (
    LayerConfig(index=0, prefix="0.", group=0, scale=0.3),
    LayerConfig(index=1, prefix="1.", group=1, scale=0.4, window=3, softcap=0.05, rope=1),
    LayerConfig(index=2, prefix="2.", group=0, scale=0.3, experts=EXPERTS),
)
SIZES = LayerSizes(heads=4, kv_heads=1, head_dim=6, intermediate=10)
ROPE = Rope(theta=50.0, dim=4, scaling="linear", parameters={"factor": 2.0})
CONFIG = ModelConfig(
    architecture="Everything",
    vocab=24,
    hidden=16,
    heads=4,
    kv_heads=2,
    head_dim=8,
    intermediate=12,
    norm_eps=1e-3,
    max_position=32,
    ropes=(ROPE, Rope(theta=9.0, dim=8)),
    layers=LAYERS,
    kv_groups=(
        KVGroup(layers=(0, 2), layout=LAYOUT),
        KVGroup(layers=(1,), layout=LAYOUT, window=3),
    ),
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    qk_norm=QkNorm.HEAD,
    post_norm=True,
    query_scale=QueryScale(rate=0.8, length=3),
    embedding_scale=30.0,
    residual_scale=0.5,
    head=Head(scale=2.0, softcap=0.5),
)
FAMILY = decoder(lambda hf: CONFIG)
PROMPT = (5, 3, 17, 2, 2, 20, 9, 11)


def load(config: ModelConfig, specs: Any) -> Params:
    """Dummy weights of these parameters; noise that is large enough to matter."""

    def enlarge(spec: ParamSpec, weight: Weight) -> Weight:
        fixed = spec.compute is not None or spec.dummy is not None
        return Weight(
            tensor=weight.tensor if fixed else weight.tensor * 20,
            bias=None if weight.bias is None else weight.bias * 20,
        )

    return load_weights(
        Path(),
        specs,
        config,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_seq_len=16,
        dummy=True,
        prepare=enlarge,
    )


def score(config: ModelConfig, family: Model = FAMILY) -> object:
    """Its parameters' shapes and types, and the scores of a prompt; or why it is refused."""
    if fault := find_group_fault(config):
        return fault
    specs = parameters(config)
    shapes = {name: (spec.shape, spec.dtype) for name, spec in specs.items()}
    paged = Paged.new(family, config, load(config, specs), TorchOps())
    return [shapes, paged.step({0: PROMPT})]


def score_layer(layer: LayerConfig) -> object:
    """The same with this as the second layer."""
    return score(attrs.evolve(CONFIG, layers=(LAYERS[0], layer, LAYERS[2])))


def score_sizes(sizes: LayerSizes) -> object:
    """The same where the second layer has these sizes."""
    layout = FullKV(kv_heads=sizes.kv_heads, k_dim=sizes.head_dim, v_dim=sizes.head_dim)
    group = attrs.evolve(CONFIG.kv_groups[1], layout=layout)
    layers = (LAYERS[0], attrs.evolve(LAYERS[1], rope=0, sizes=sizes), LAYERS[2])
    return score(attrs.evolve(CONFIG, layers=layers, kv_groups=(CONFIG.kv_groups[0], group)))


def score_conv(conv: ShortConv | DeltaRule) -> object:
    """The same with this as the second layer."""
    what = {"conv" if isinstance(conv, ShortConv) else "delta": conv}
    layer = LayerConfig(index=1, prefix="1.", group=1, scale=0.4, **what)
    groups = (CONFIG.kv_groups[0], KVGroup(layers=(1,), layout=conv.layout))
    layers = (LAYERS[0], layer, LAYERS[2])
    return score(attrs.evolve(CONFIG, layers=layers, kv_groups=groups))


def score_experts(experts: Experts) -> object:
    """The same with these experts."""
    last = attrs.evolve(LAYERS[2], experts=experts)
    return score(attrs.evolve(CONFIG, layers=(*LAYERS[:2], last)))


def score_own_experts(experts: Experts) -> object:
    """The same on a rank that has these experts alone."""
    last = attrs.evolve(LAYERS[2], experts=experts)
    shard = Shard(by_expert=True)
    return score(attrs.evolve(CONFIG, layers=(*LAYERS[:2], last), shard=shard))


def score_latent(latent: LatentAttention) -> object:
    """The same where the first layer has such attention, over vectors of 10 numbers."""
    layer = attrs.evolve(LAYERS[0], latent=latent, rope=0)
    group = KVGroup(layers=(0,), layout=LatentKV(dim=10, rope_dim=4))
    shape = {"kv_heads": 1, "head_dim": 10, "qk_norm": QkNorm.NONE}
    return score(attrs.evolve(CONFIG, layers=(layer,), kv_groups=(group,), **shape))


def score_rope(rope: Rope) -> object:
    """The same with this as the first rope."""
    return score(attrs.evolve(CONFIG, ropes=(rope, CONFIG.ropes[1])))


def dtype_on_gpu(config: ModelConfig) -> str:
    """The type that the model runs in on a GPU."""
    return resolve_model_dtype("auto", config, DeviceEnv(device="cuda", capability=(9, 0)))


def features_asked(config: ModelConfig) -> object:
    """What the model asks of attention."""
    needs = attrs.evolve(terms.NEEDS, model=config)
    return terms.refusals_of_query(needs.make_query(frozenset()))


def score_shard(shard: Shard) -> object:
    """The configuration of a shard, and what the whole makes of its part of the vocabulary."""
    assert FAMILY.shard is not None
    return [FAMILY.shard(CONFIG, shard), score(attrs.evolve(CONFIG, shard=shard))]


def score_family(family: Model) -> object:
    """The scores of a family, and which of its parameters a shard of it has."""
    config = family.config({})
    params = load(config, family.params(config))
    whole = Paged.new(family, config, params, TorchOps()).step({0: PROMPT})
    part = family.shard(config, Shard(index=1, count=2)) if family.shard is not None else None
    return [whole, part]


def forward_twice(
    params: Params, config: ModelConfig, batch: Any, attend: Attend, ops: Any
) -> torch.Tensor:
    """The decoder's hidden states, doubled."""
    return FAMILY.forward(params, config, batch, attend, ops) * 2


class Doubling(Collectives):
    """Two ranks, of which the other brings what this one does."""

    count = 2

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def settle(stream: Stream) -> object:
    """The whole stream, and what the next norm would have found."""
    copy = attrs.evolve(
        stream,
        total=stream.total.clone(),
        pending=None if stream.pending is None else stream.pending.clone(),
    )
    return copy.settle()


def load_spec(spec: ParamSpec) -> object:
    """The dummy parameter that is loaded."""
    return load_weights(
        Path(),
        {"x": spec},
        CONFIG,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_seq_len=16,
        dummy=True,
    )


ONES = torch.ones(2, 3)
SPEC = ParamSpec(shape=(2, 3), sources=(("a", "b"),))

LATENT = LatentAttention(q_rank=6, kv_rank=6, nope_dim=5, rope_dim=4, v_dim=3, norm_eps=0.1)

CASES: dict[str, Case] = {
    **vary(
        CONFIG,
        score,
        {
            "vocab": 32,
            "hidden": 24,
            "heads": 2,
            "kv_heads": 4,
            "head_dim": 4,
            "intermediate": 20,
            "norm_eps": 0.5,
            "max_position": 64,
            "ropes": CONFIG.ropes[::-1],
            "layers": LAYERS[:2],
            "kv_groups": CONFIG.kv_groups[:1],
            "qkv_bias": False,
            "out_bias": False,
            "mlp_bias": False,
            "qk_norm": QkNorm.WHOLE,
            "value_norm": True,
            "norm_offset": True,
            "wide_norms": True,
            "pre_norm": False,
            "post_norm": False,
            "query_scale": None,
            "embedding_scale": 1.0,
            "residual_scale": 1.0,
            "head": Head(),
            "tied_embeddings": True,
            "activation": Activation.GELU,
        },
    ),
    **vary(
        QueryScale(rate=0.8, length=3),
        lambda scale: score(attrs.evolve(CONFIG, query_scale=scale)),
        {"rate": 0.3, "length": 2.0},
    ),
    **vary(CONFIG, dtype_on_gpu, {"dtype": "bfloat16"}),
    **vary(CONFIG, features_asked, {"features": frozenset({Feature.LSE})}),
    **vary(
        LAYERS[1],
        score_layer,
        {
            "index": 5,
            "prefix": "second.",
            "group": 0,
            "scale": 3.0,
            "window": 2,
            "softcap": 0.0,
            "rope": None,
            "experts": EXPERTS,
            "latent": LATENT,
            "conv": CONV,
            "delta": DELTA,
            "has_gate": True,
            "sinks": "sinks of the second",
            "scalar": "scalar of the second",
            "sizes": attrs.evolve(SIZES, heads=2, kv_heads=2, head_dim=8),
        },
    ),
    **vary(SIZES, score_sizes, {"heads": 8, "kv_heads": 2, "head_dim": 4, "intermediate": 8}),
    **vary(CONV, score_conv, {"taps": 4, "width": 8, "bias": False}),
    **vary(
        DELTA,
        score_conv,
        {"key_heads": 4, "value_heads": 2, "key_dim": 6, "value_dim": 4, "taps": 2},
    ),
    **vary(
        EXPERTS,
        score_experts,
        {
            "count": 8,
            "per_token": 1,
            "intermediate": 12,
            "renormalize": False,
            "norm_floor": 0.0,
            "choice_bias": False,
            "shared": 0,
            "shared_gate": False,
            "scoring": Scoring.SOFTMAX,
            "wide_scores": True,
            "groups": 1,
            "groups_per_token": 2,
            "group_best": 1,
            "scale": 1.0,
            "score_bias": False,
            "bias": False,
            "gate": None,
            "has_scales": True,
            "beside_mlp": True,
        },
    ),
    **vary(
        ClampedGate(limit=0.3, slope=2.0),
        lambda gate: score_experts(attrs.evolve(EXPERTS, gate=gate)),
        {"limit": 0.1, "slope": 1.0},
    ),
    **vary(
        LATENT,
        score_latent,
        {
            "q_rank": None,
            "kv_rank": 7,
            "nope_dim": 7,
            "rope_dim": 2,
            "v_dim": 5,
            "norm_eps": 1e-6,
        },
    ),
    **vary(
        ROPE,
        score_rope,
        {
            "theta": 7.0,
            "dim": 8,
            "scaling": "default",
            "parameters": {"factor": 3.0},
            "interleaved": True,
        },
    ),
    **vary(
        Head(scale=2.0, softcap=0.5),
        lambda head: score(attrs.evolve(CONFIG, head=head)),
        {"scale": 1.0, "softcap": 0.0},
    ),
    **vary(Shard(index=0, count=2), score_shard, {"index": 1, "count": 3, "vocab": 5}),
    **vary(Shard(index=0, count=2), score_shard, {"by_expert": True}),
    **vary(attrs.evolve(EXPERTS, held=6), score_own_experts, {"first": 6, "held": 3}),
    **vary(CONFIG, score, {"shard": Shard(index=1, count=2)}),
    **vary(
        FAMILY,
        score_family,
        {
            "config": lambda hf: attrs.evolve(CONFIG, head=Head()),
            "params": lambda config: parameters(attrs.evolve(config, out_bias=False)),
            "forward": forward_twice,
            "shard": None,
        },
    ),
    **vary(
        Stream(ONES, ONES), settle, {"total": ONES * 2, "pending": None, "sum_over": Doubling()}
    ),
    **vary(
        SPEC,
        load_spec,
        {
            "shape": (3, 2),
            "dtype": "float64",
            "dummy": 1.0,
            "source_shape": (6,),
            "transform": torch.neg,
            "compute": lambda config, length: ONES,
        },
    ),
}
