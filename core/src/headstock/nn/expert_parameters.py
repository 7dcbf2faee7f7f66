"""Parameters of a mixture of experts, by how a checkpoint stores them."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from headstock.nn.param_specs import NamedSpecs, Transform, first_shard_transform
from headstock.spi import Experts, LayerConfig, ModelConfig, ParamSpec, Role

_EXPERTS = frozenset((Role.EXPERTS,))


def make_router_specs(
    config: ModelConfig, layer: LayerConfig, experts: Experts, source: str
) -> NamedSpecs:
    """The map that scores experts, and its bias if any."""
    name, roles = f"{layer.prefix}router", frozenset((Role.ROUTER,))
    dtype = "float32" if experts.wide_scores else None
    yield (
        name,
        ParamSpec(
            shape=(experts.count, config.hidden),
            roles=roles,
            sources=((f"{source}.weight",),),
            dtype=dtype,
        ),
    )
    if experts.score_bias:
        yield (
            f"{name}.bias",
            ParamSpec(
                shape=(experts.count,), roles=roles, sources=((f"{source}.bias",),), dtype=dtype
            ),
        )


def make_expert_specs(
    config: ModelConfig,
    layer: LayerConfig,
    experts: Experts,
    wholes: tuple[str, str],
    gate_up: tuple[tuple[str, ...], ...],
    down: tuple[tuple[str, ...], ...],
    *,
    may_swap_whole: bool,
) -> NamedSpecs:
    """Both maps from one tensor an expert, or from one for all.

    wholes: the names of the tensors for all experts
    gate_up, down: a row for each expert, without `.weight`
    """
    prefix, inner, held = layer.prefix, experts.intermediate, experts.held or experts.count
    yield (
        f"{prefix}experts_gate_up",
        ParamSpec(
            shape=(held, 2 * inner, config.hidden),
            roles=_EXPERTS,
            sources=_end_names(gate_up, ".weight"),
            stacked=True,
            parts=(inner, inner),
            whole=wholes[0],
            may_swap_whole=may_swap_whole,
        ),
    )
    yield (
        f"{prefix}experts_down",
        ParamSpec(
            shape=(held, config.hidden, inner),
            roles=_EXPERTS,
            sources=_end_names(down, ".weight"),
            stacked=True,
            whole=wholes[1],
            may_swap_whole=may_swap_whole,
        ),
    )
    if experts.bias:
        yield (
            f"{prefix}experts_gate_up.bias",
            ParamSpec(
                shape=(held, 2 * inner),
                roles=_EXPERTS,
                sources=_end_names(gate_up, ".bias"),
                stacked=True,
                parts=(inner, inner),
            ),
        )
        yield (
            f"{prefix}experts_down.bias",
            ParamSpec(
                shape=(held, config.hidden),
                roles=_EXPERTS,
                sources=_end_names(down, ".bias"),
                stacked=True,
                transform=_summed_bias_transform(config),
            ),
        )


def make_stacked_expert_specs(
    config: ModelConfig, layer: LayerConfig, experts: Experts, wholes: tuple[str, str]
) -> NamedSpecs:
    """Both maps from tensors for all experts, [experts, inputs, outputs].

    Gate and up take turns among the outputs of the first, so a rank's part is one slice.
    """
    prefix, inner, held = layer.prefix, experts.intermediate, experts.held or experts.count
    gate_up, down = wholes
    yield (
        f"{prefix}experts_gate_up",
        ParamSpec(
            shape=(held, 2 * inner, config.hidden),
            roles=_EXPERTS,
            sources=((gate_up,),),
            source_shape=(held, config.hidden, 2 * inner),
            transform=partial(_sort_turns, is_map=True),
            packed_rows=_sort_turned_rows,
        ),
    )
    yield (
        f"{prefix}experts_down",
        ParamSpec(
            shape=(held, config.hidden, inner),
            roles=_EXPERTS,
            sources=((down,),),
            source_shape=(held, inner, config.hidden),
            transform=_swap,
            packed_rows=_keep_rows,
        ),
    )
    if experts.bias:
        yield (
            f"{prefix}experts_gate_up.bias",
            ParamSpec(
                shape=(held, 2 * inner),
                roles=_EXPERTS,
                sources=((f"{gate_up}_bias",),),
                transform=partial(_sort_turns, is_map=False),
            ),
        )
        yield (
            f"{prefix}experts_down.bias",
            ParamSpec(
                shape=(held, config.hidden),
                roles=_EXPERTS,
                sources=((f"{down}_bias",),),
                transform=_summed_bias_transform(config),
            ),
        )


def _end_names(rows: tuple[tuple[str, ...], ...], end: str) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(f"{name}{end}" for name in row) for row in rows)


def _summed_bias_transform(config: ModelConfig) -> Transform | None:
    """As `first_shard_transform`, where each rank has a part of every expert."""
    return None if config.shard.by_expert else first_shard_transform(config)


def _swap(weight: Tensor) -> Tensor:
    """[experts, outputs, inputs] of [experts, inputs, outputs]."""
    return weight.mT.contiguous()


def _sort_turns(weight: Tensor, *, is_map: bool) -> Tensor:
    """All gates before all ups, as outputs that took turns.

    weight: [experts, outputs], or of a map [experts, inputs, outputs]
    """
    gate, up = weight[..., 0::2], weight[..., 1::2]
    return torch.cat((gate.mT, up.mT), 1) if is_map else torch.cat((gate, up), -1)


def _sort_turned_rows(rows: Tensor) -> Tensor:
    """All gates before all ups, as rows that took turns.   rows: [experts, outputs, columns]"""
    return torch.cat((rows[:, 0::2], rows[:, 1::2]), 1)


def _keep_rows(rows: Tensor) -> Tensor:
    return rows
