"""Operations are chosen once for each layer, and fused and composed ones meet in one forward."""

from __future__ import annotations

import ops_cases as cases
import pytest
import torch
from attrs import evolve
from torch import Tensor

from headstock.errors import CannotRun, PluginBroken
from headstock.nn.decoder import forward
from headstock.ops.bound import BoundOps
from headstock.ops.onednn_ops import OneDnnOps
from headstock.ops.torch_ops import TorchOps
from headstock.spi import (
    OPERATIONS,
    Activation,
    Batch,
    ClampedGate,
    Experts,
    Head,
    LatentAttention,
    LayerConfig,
    ModelConfig,
    Ops,
    ParamSpec,
    QkNorm,
    QueryScale,
    Rope,
    Scoring,
    Shard,
    ShortConv,
    Stream,
    Variant,
    Weight,
    find_variants,
)

SHAPE = cases.Shape(hidden=16, heads=2, kv_heads=1, head_dim=8, intermediate=24, vocab=32, layers=3)
CONFIG = cases.config_of(SHAPE)
EXPERTS = Experts(count=3, per_token=2, intermediate=8, renormalize=True)


class Waiting(TorchOps):
    """Attention's projection and the feed-forward part, in some layers: they leave their terms
    pending, as fused operations do."""

    layers = (0, 2)

    def takes(self, operation: str, config: ModelConfig, layer: LayerConfig | None) -> bool:
        return layer is not None and layer.index in self.layers

    def attn_out(
        self,
        x: Stream,
        attention: Tensor,
        layer: LayerConfig,
        batch: Batch,
    ) -> Stream:
        out = self.linear(attention.flatten(1), self.params[f"{layer.prefix}attn_out"], batch)
        x.settle()
        x.pending = out
        return x

    def mlp(self, x: Stream, layer: LayerConfig, batch: Batch) -> Stream:
        before = x.settle().clone()
        x = super().mlp(x, layer, batch)
        return Stream(before, x.total - before)


class Careless(Waiting):
    """Replaces operations and does not say for which models."""

    takes = TorchOps.takes


def hidden_of(ops: TorchOps, config: ModelConfig) -> Tensor:
    """What the decoder makes of some tokens where attention gives back the queries."""
    params = cases.params_of(config, torch.float32, "cpu")
    batch = cases.batch_of(config, 5, torch.float32, "cpu")
    bound = BoundOps("mine", ops, config)
    bound.bind(params, config)
    with torch.inference_mode():
        return forward(params, config, batch, lambda q, layer: q, bound)


@pytest.mark.parametrize("layers", [(), (0,), (1, 2), (0, 1, 2)])
def test_layers_that_are_fused_and_composed_meet_in_one_forward(layers: tuple[int, ...]) -> None:
    some = Waiting()
    some.layers = layers

    torch.testing.assert_close(hidden_of(some, CONFIG), hidden_of(TorchOps(), CONFIG))


def test_the_table_says_what_is_fused_and_where() -> None:
    layers = (*CONFIG.layers[:2], evolve(CONFIG.layers[2], experts=EXPERTS))
    table = BoundOps("mine", Waiting(), evolve(CONFIG, layers=layers)).table

    assert table.lines() == [
        "fused: attn_out (layers 0, 2), mlp (layers 0)",
        "composed: embed, qkv_rope_store, attn_out (layers 1), mlp (layers 1), moe, final_norm, "
        "lm_head, lm_head_sample",
    ]
    assert BoundOps("torch", TorchOps(), CONFIG).table.lines() == ["all composed"]


def test_operations_that_are_replaced_without_takes_are_not_ignored_in_silence() -> None:
    with pytest.raises(PluginBroken, match=r"'mine' replaces attn_out, mlp, but has no `takes`"):
        BoundOps("mine", Careless(), CONFIG)


def test_a_set_without_fine_operations_takes_all_or_is_refused() -> None:
    from toy_plugins import ToyOps

    class Picky(ToyOps):
        def takes(self, operation: str, config: ModelConfig, layer: LayerConfig | None) -> bool:
            return operation != "mlp"

    BoundOps("toy", ToyOps(), CONFIG)
    with pytest.raises(CannotRun, match=r"ops \(--ops\) toy does not take mlp of this model"):
        BoundOps("toy", Picky(), CONFIG)


def test_a_norm_that_was_not_prepared_as_one_is_not_multiplied() -> None:
    ops, x = OneDnnOps(), cases.noise(3, 16, dtype=torch.float32, device="cpu")
    weight = Weight(tensor=cases.noise(16, dtype=torch.float32, device="cpu", seed=1))
    raw = ops.prepare(ParamSpec(shape=(16,)), weight)

    torch.testing.assert_close(ops.rms_norm(x, raw, 1e-6), TorchOps().rms_norm(x, weight, 1e-6))


def test_layers_with_a_convolution_have_no_attention_of_their_own() -> None:
    from toy_plugins import ToyOps

    first, *others = CONFIG.layers
    config = evolve(CONFIG, layers=(evolve(first, conv=CONV), *others))
    answers = dict(BoundOps("torch", TorchOps(), config).table.fused)

    assert dict(answers["short_conv"]) == {0: False}
    assert dict(answers["qkv_rope_store"]).keys() == {layer.index for layer in others}
    assert dict(answers["mlp"]).keys() == {layer.index for layer in config.layers}

    class Plain(ToyOps):
        short_conv = Ops.short_conv

    with pytest.raises(
        CannotRun, match=r"ops \(--ops\) toy does not take short_conv of this model"
    ):
        BoundOps("toy", Plain(), config)


CONV = ShortConv(taps=3, width=8)
HALF = Rope(theta=100.0, dim=4)
ROPE = CONFIG.ropes[0]
LATENT = LatentAttention(q_rank=None, kv_rank=4, nope_dim=4, rope_dim=8, v_dim=4, norm_eps=1e-6)
VARIANTS = [
    ({}, {}, {}),
    (
        {"wide_norms": True},
        {},
        {"embed": "WIDE_NORM", "mlp": "WIDE_NORM", "final_norm": "WIDE_NORM"},
    ),
    ({"norm_offset": True}, {}, {"qkv_rope_store": "WIDE_NORM"}),
    ({"pre_norm": False}, {}, {"embed": "NO_PRE_NORM", "qkv_rope_store": "NO_PRE_NORM"}),
    ({"pre_norm": False}, {"conv": CONV}, {"short_conv": "NO_PRE_NORM"}),
    ({"norm_offset": True}, {"conv": CONV}, {"short_conv": "WIDE_NORM"}),
    ({"post_norm": True}, {}, {"attn_out": "POST_NORM", "mlp": "POST_NORM"}),
    ({"post_norm": True}, {"conv": CONV}, {"short_conv": "POST_NORM"}),
    ({"residual_scale": 0.5}, {"conv": CONV}, {"short_conv": "SCALED_RESIDUAL"}),
    ({"embedding_scale": 2.0}, {}, {"embed": "SCALED_EMBEDDING"}),
    ({"residual_scale": 0.5}, {}, {"attn_out": "SCALED_RESIDUAL", "mlp": "SCALED_RESIDUAL"}),
    ({"qk_norm": QkNorm.WHOLE}, {}, {"qkv_rope_store": "WHOLE_QK_NORM"}),
    ({}, {"latent": LATENT}, {"qkv_rope_store": "LATENT", "attn_out": "LATENT"}),
    (
        {"query_scale": QueryScale(rate=0.1, length=8)},
        {},
        {"qkv_rope_store": "QUERY_SCALE"},
    ),
    ({}, {"rope": None}, {"qkv_rope_store": "NO_ROPE"}),
    ({}, {"v_scale": 2.0}, {"qkv_rope_store": "KV_SCALES"}),
    ({}, {"has_gate": True}, {"attn_out": "OUTPUT_GATE"}),
    ({"ropes": (HALF,)}, {}, {"qkv_rope_store": "PARTIAL_ROPE"}),
    ({"ropes": (ROPE, ROPE)}, {"rope": 1}, {"qkv_rope_store": "ROPE_BY_LAYER"}),
    (
        {},
        {"sizes": evolve(CONFIG.sizes, intermediate=8)},
        dict.fromkeys(("qkv_rope_store", "attn_out", "mlp"), "SIZES_BY_LAYER"),
    ),
    ({}, {"sizes": CONFIG.sizes}, {}),
    ({}, {"scalar": "scalar"}, {"mlp": "LAYER_SCALAR"}),
    ({}, {"scalar": "scalar", "experts": EXPERTS}, {"moe": "LAYER_SCALAR"}),
    ({"value_norm": True}, {}, {"qkv_rope_store": "VALUE_NORM"}),
    ({}, {"experts": evolve(EXPERTS, has_scales=True)}, {"moe": "EXPERT_SCALES"}),
    ({}, {"experts": evolve(EXPERTS, beside_mlp=True)}, {"moe": "BESIDE_MLP"}),
    ({"activation": Activation.GELU}, {}, {"mlp": "GELU"}),
    ({"activation": Activation.GELU_TANH}, {}, {"mlp": "GELU_TANH"}),
    ({"head": Head(scale=2.0)}, {}, {"lm_head": "HEAD_SCALE", "lm_head_sample": "HEAD_SCALE"}),
    ({"head": Head(softcap=2.0)}, {}, {"lm_head_sample": "HEAD_SOFTCAP"}),
    ({}, {"experts": evolve(EXPERTS, shared=4)}, {"moe": "SHARED_EXPERT"}),
    ({}, {"experts": evolve(EXPERTS, shared_gate=True)}, {"moe": "GATED_SHARED_EXPERT"}),
    ({}, {"experts": evolve(EXPERTS, choice_bias=True)}, {"moe": "BIASED_CHOICE"}),
    ({}, {"experts": evolve(EXPERTS, norm_floor=0.1)}, {"moe": "NORM_FLOOR"}),
    ({}, {"experts": evolve(EXPERTS, scoring=Scoring.SIGMOID)}, {"moe": "SIGMOID_SCORES"}),
    ({}, {"experts": evolve(EXPERTS, wide_scores=True)}, {"moe": "WIDE_SCORES"}),
    ({}, {"experts": evolve(EXPERTS, groups=3)}, {"moe": "GROUPED_CHOICE"}),
    ({}, {"experts": evolve(EXPERTS, scale=2.0)}, {"moe": "SCALED_WEIGHTS"}),
    ({}, {"experts": evolve(EXPERTS, score_bias=True)}, {"moe": "SCORE_BIAS"}),
    ({}, {"experts": evolve(EXPERTS, bias=True)}, {"moe": "EXPERT_BIAS"}),
    (
        {},
        {"experts": evolve(EXPERTS, gate=ClampedGate(limit=7.0, slope=1.7))},
        {"moe": "CLAMPED_GATE"},
    ),
    ({}, {"experts": evolve(EXPERTS, held=2)}, {"moe": "EXPERT_SHARD"}),
    (
        {"shard": Shard(index=0, count=2)},
        {},
        dict.fromkeys(("embed", "lm_head", "lm_head_sample"), "VOCAB_SHARD"),
    ),
    ({"qk_norm": QkNorm.HEAD}, {}, {"qkv_rope_store": "HEAD_QK_NORM"}),
]


@pytest.mark.parametrize(("changes", "of_layer", "expected"), VARIANTS, ids=str)
def test_each_variant_is_named_to_the_operations_that_it_changes(
    changes: dict[str, object], of_layer: dict[str, object], expected: dict[str, str]
) -> None:
    plain = evolve(CONFIG, qk_norm=QkNorm.NONE)
    layers = tuple(evolve(layer, **of_layer) for layer in plain.layers)
    config = evolve(plain, layers=layers, **changes)
    found = {
        operation: find_variants(operation, config, config.layers[0]) for operation in OPERATIONS
    }

    assert {name: found[name] for name in expected} == {
        name: frozenset((Variant[value],)) for name, value in expected.items()
    }
    assert any(found.values()) == bool(expected)


def test_every_variant_is_asked_for_by_some_configuration() -> None:
    asked = {value for _, _, expected in VARIANTS for value in expected.values()}
    assert asked == {each.name for each in Variant}
