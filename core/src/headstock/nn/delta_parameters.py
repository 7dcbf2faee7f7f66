"""Parameters of a gated delta rule."""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from headstock.nn.conv_parameters import by_tap
from headstock.nn.param_specs import NamedSpecs, make_linear_specs
from headstock.spi import DeltaRule, LayerConfig, ModelConfig, ParamSpec


@frozen(kw_only=True)
class DeltaNames:
    """What checkpoints call the parts of a gated delta rule, after `model.layers.N.`."""

    qkv: str = "linear_attn.in_proj_qkv"
    gate: str = "linear_attn.in_proj_z"
    beta: str = "linear_attn.in_proj_b"
    decay: str = "linear_attn.in_proj_a"
    conv: str = "linear_attn.conv1d"
    decay_bias: str = "linear_attn.dt_bias"
    decay_rate: str = "linear_attn.A_log"
    norm: str = "linear_attn.norm"
    out: str = "linear_attn.out_proj"


DELTA_NAMES = DeltaNames()


def make_delta_specs(
    config: ModelConfig, layer: LayerConfig, delta: DeltaRule, names: DeltaNames
) -> NamedSpecs:
    """Parameters of a gated delta rule."""
    source, prefix = f"model.layers.{layer.index}.", layer.prefix
    keys = delta.key_heads * delta.key_dim
    merged = (keys, keys, delta.width)
    yield from make_linear_specs(
        f"{prefix}delta_in", config.hidden, (f"{source}{names.qkv}",), merged, False
    )
    yield from make_linear_specs(
        f"{prefix}delta_gate", config.hidden, (f"{source}{names.gate}",), (delta.width,), False
    )
    yield from make_linear_specs(
        f"{prefix}delta_gates",
        config.hidden,
        (f"{source}{names.beta}", f"{source}{names.decay}"),
        (delta.value_heads,) * 2,
        False,
    )
    yield (
        f"{prefix}conv",
        ParamSpec(
            shape=(delta.taps, delta.channels),
            sources=((f"{source}{names.conv}.weight",),),
            source_shape=(delta.channels, 1, delta.taps),
            parts=merged,
            transform=by_tap,
        ),
    )
    for name, stored, transform in (
        ("delta_bias", names.decay_bias, None),
        ("delta_rate", names.decay_rate, torch.exp),
    ):
        yield (
            f"{prefix}{name}",
            ParamSpec(
                shape=(delta.value_heads,),
                sources=((f"{source}{stored}",),),
                dtype="float32",
                transform=transform,
            ),
        )
    yield (
        f"{prefix}delta_norm",
        ParamSpec(
            shape=(delta.value_dim,), sources=((f"{source}{names.norm}.weight",),), dummy=1.0
        ),
    )
    yield from make_linear_specs(
        f"{prefix}delta_out", delta.width, (f"{source}{names.out}",), (config.hidden,), False
    )


def take_queries(heads: int, head_dim: int, rows: Tensor) -> Tensor:
    """The rows without those of gates, of which each head has some behind its queries'.

    rows: [2 * heads * head_dim + ..., ...]
    """
    size = heads * head_dim
    mixed = rows[: 2 * size].view(heads, 2, head_dim, *rows.shape[1:])
    return torch.cat((mixed[:, 0].reshape(size, *rows.shape[1:]), rows[2 * size :]))


def take_gates(heads: int, head_dim: int, rows: Tensor) -> Tensor:
    """The rows of gates.   rows: [2 * heads * head_dim, ...]"""
    mixed = rows.view(heads, 2, head_dim, *rows.shape[1:])
    return mixed[:, 1].reshape(heads * head_dim, *rows.shape[1:])
