"""Parameters of a gated delta rule."""

from __future__ import annotations

from functools import partial

import torch
from attrs import frozen
from torch import Tensor

from headstock.nn.conv_parameters import by_tap
from headstock.nn.param_specs import NamedSpecs, make_linear_specs
from headstock.spi import DeltaRule, LayerConfig, ModelConfig, ParamSpec


@frozen(kw_only=True)
class DeltaNames:
    """What checkpoints call the parts of a gated delta rule, after `model.layers.N.`.

    by_key_head: two maps in place of the first four, where the rows of each key head lie together:
        its query, its key, the values that it serves and their gates; and their betas and decays
    """

    qkv: str = "linear_attn.in_proj_qkv"
    gate: str = "linear_attn.in_proj_z"
    beta: str = "linear_attn.in_proj_b"
    decay: str = "linear_attn.in_proj_a"
    conv: str = "linear_attn.conv1d"
    decay_bias: str = "linear_attn.dt_bias"
    decay_rate: str = "linear_attn.A_log"
    norm: str = "linear_attn.norm"
    out: str = "linear_attn.out_proj"
    by_key_head: tuple[str, str] | None = None


DELTA_NAMES = DeltaNames()


def make_delta_specs(
    config: ModelConfig, layer: LayerConfig, delta: DeltaRule, names: DeltaNames
) -> NamedSpecs:
    """Parameters of a gated delta rule."""
    source, prefix = f"model.layers.{layer.index}.", layer.prefix
    if names.by_key_head is None:
        yield from _make_separate_maps(config, layer, delta, names)
    else:
        yield from _make_grouped_maps(config, layer, delta, names.by_key_head)
    yield (
        f"{prefix}conv",
        ParamSpec(
            shape=(delta.taps, delta.channels),
            sources=((f"{source}{names.conv}.weight",),),
            source_shape=(delta.channels, 1, delta.taps),
            parts=_list_merged(delta),
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


def _list_merged(delta: DeltaRule) -> tuple[int, int, int]:
    """How many rows queries, keys and values have in the map that merges them."""
    keys = delta.key_heads * delta.key_dim
    return keys, keys, delta.width


def _make_separate_maps(
    config: ModelConfig, layer: LayerConfig, delta: DeltaRule, names: DeltaNames
) -> NamedSpecs:
    """The maps of a layer's input, of which the checkpoint has each with all heads."""
    source, prefix = f"model.layers.{layer.index}.", layer.prefix
    yield from make_linear_specs(
        f"{prefix}delta_in", config.hidden, (f"{source}{names.qkv}",), _list_merged(delta), False
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


def _make_grouped_maps(
    config: ModelConfig, layer: LayerConfig, delta: DeltaRule, names: tuple[str, str]
) -> NamedSpecs:
    """The same maps, where the checkpoint has the rows of each key head together.

    A shard's key heads lie side by side there, so that it reads one slice of each tensor.
    """
    source, prefix = f"model.layers.{layer.index}.", layer.prefix
    both, gates = (f"{source}{name}" for name in names)
    # Parts of one tensor, which is read twice: beside it a load has room for one parameter.
    for name, rows, take in (
        ("delta_in", delta.channels, _take_qkv),
        ("delta_gate", delta.width, _take_value_gates),
    ):
        yield from make_linear_specs(
            f"{prefix}{name}",
            config.hidden,
            (both,),
            (delta.channels + delta.width,),
            False,
            partial(take, delta),
            rows=rows,
        )
    yield from make_linear_specs(
        f"{prefix}delta_gates",
        config.hidden,
        (gates,),
        (2 * delta.value_heads,),
        False,
        partial(_split_betas, delta),
    )


def _take_qkv(delta: DeltaRule, rows: Tensor) -> Tensor:
    """The queries of all key heads, then their keys, and then all values.

    rows: [channels + width, hidden], of each key head its query, its key, the values that it serves
        and their gates
    """
    q, k, v, _ = _split_key_heads(delta, rows)
    return torch.cat((*q, *k, *v))


def _take_value_gates(delta: DeltaRule, rows: Tensor) -> Tensor:
    """The gates of all values.   rows: as in `_take_qkv`"""
    # A copy even of one key head's, so that the other rows are freed.
    return torch.cat(tuple(_split_key_heads(delta, rows)[-1]))


def _split_key_heads(delta: DeltaRule, rows: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys, values and gates, [key_heads, rows of one, hidden] each."""
    values = delta.width // delta.key_heads
    by_head = rows.view(delta.key_heads, -1, *rows.shape[1:])
    sizes = [delta.key_dim, delta.key_dim, values, values]
    return torch.split(by_head, sizes, 1)


def _split_betas(delta: DeltaRule, rows: Tensor) -> Tensor:
    """The betas of all values, then their decays.

    rows: [2 * value_heads, hidden], of each key head the betas of its values and their decays
    """
    betas, decays = rows.view(delta.key_heads, 2, -1, *rows.shape[1:]).unbind(1)
    return torch.cat((*betas, *decays))


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
