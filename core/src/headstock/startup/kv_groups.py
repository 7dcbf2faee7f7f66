"""Check what a model family says of its KV groups, before anything is made of them."""

from __future__ import annotations

from collections import Counter

import torch

from headstock.errors import PluginBroken, shorten
from headstock.spi import (
    FullKV,
    KVGroup,
    LatentKV,
    LayerConfig,
    LayoutKind,
    ModelConfig,
    PluginSpec,
    QkNorm,
    StateKV,
)


def check_kv_groups(spec: PluginSpec, model: ModelConfig) -> None:
    """Raise PluginBroken, naming the family, when the KV groups contradict the layers."""
    fault = find_group_fault(model)
    if fault:
        raise PluginBroken(
            f"the model family {spec.name!r} describes KV groups that cannot be served: {fault}; "
            "report it to its author"
        )


def find_group_fault(model: ModelConfig) -> str:
    """Find the first contradiction between the KV groups and the layers; empty when none is."""
    counts = Counter(layer for group in model.kv_groups for layer in group.layers)
    indices = [layer.index for layer in model.layers]
    if indices != list(range(len(indices))):
        return f"numbers of layers: expected 0, 1, 2, ... in order, got {_first(indices)}"
    for layer in model.layers:
        if counts[layer.index] != 1:
            return f"groups of layer {layer.index}: expected exactly one, got {counts[layer.index]}"
        if not 0 <= layer.group < len(model.kv_groups):
            return (
                f"layer {layer.index} names group {layer.group}, and there are "
                f"{len(model.kv_groups)}"
            )
        if layer.index not in model.kv_groups[layer.group].layers:
            return f"layer {layer.index} names group {layer.group}, which does not list it"
        if layer.state not in (None, model.kv_groups[layer.group].layout):
            return (
                f"layer {layer.index} keeps {layer.state}, and its "
                f"group keeps {model.kv_groups[layer.group].layout}"
            )
        if fault := _find_window_fault(layer, model.kv_groups[layer.group]):
            return fault
        if fault := _find_latent_fault(model, layer, model.kv_groups[layer.group]):
            return fault
    stray = sorted(counts.keys() - set(indices))
    if stray:
        return f"a group lists layer {stray[0]}, and there are {len(indices)} layers"
    for number, group in enumerate(model.kv_groups):
        if not group.layers:
            return f"group {number} has no layer; leave it out"
        if fault := _find_layout_fault(model, group):
            return f"group {number} {fault}"
    if not any(group.layout.kind is not LayoutKind.STATE for group in model.kv_groups):
        return "expected at least one group that keeps tokens, got none"
    return ""


def _first(numbers: list[int], most: int = 4) -> str:
    """Write the first of the numbers."""
    return ", ".join(map(str, numbers[:most])) + (", ..." if len(numbers) > most else "")


def _find_window_fault(layer: LayerConfig, group: KVGroup) -> str:
    """Find how the windows of a layer and its group contradict each other."""
    where = f"layer {layer.index} of group {layer.group}"
    if layer.window is not None and layer.window < 1:
        return f"{where}: window: expected 1 or more, got {layer.window}"
    if isinstance(group.layout, StateKV):
        if layer.window is None and group.window is None:
            return ""
        return f"{where}: window: expected None, since the group keeps a state, got one"
    # The group frees what lies behind its window, so a layer that looks further back would read
    # pages of other requests.
    if group.window is not None and (layer.window is None or layer.window > group.window):
        sees = "all tokens" if layer.window is None else f"{layer.window} tokens"
        return f"{where} sees {sees}, and the group keeps {group.window}"
    return ""


def _find_latent_fault(model: ModelConfig, layer: LayerConfig, group: KVGroup) -> str:
    """Find how the attention of a layer and the layout of its group contradict each other."""
    # A family with its own operations may read latent vectors differently.
    if layer.latent is None:
        return ""
    latent, where = layer.latent, f"layer {layer.index} of group {layer.group}"
    if group.layout != latent.layout:
        return f"{where} has latent attention over {latent.layout}, and keeps {group.layout}"
    sizes = model.sizes_of(layer)
    shape, wanted = (sizes.kv_heads, sizes.head_dim), (1, latent.layout.dim)
    if shape != wanted:
        return f"{where} is latent: (kv_heads, head_dim): expected {wanted}, got {shape}"
    if model.qk_norm is not QkNorm.NONE:
        return f"{where} is latent: qk_norm: expected none, got {model.qk_norm.value}"
    if layer.rope is None or model.ropes[layer.rope].dim != latent.rope_dim:
        return f"{where} has no rope for the {latent.rope_dim} elements that are turned"
    return ""


def _find_layout_fault(model: ModelConfig, group: KVGroup) -> str:
    """Find what is wrong with the sizes of a group's layout, as the end of a sentence."""
    # A plugin may give anything, whatever the type says.
    layout: object = group.layout
    if group.window is not None and group.window < 1:
        return f"has a wrong window: expected 1 or more, got {group.window}"
    if group.dtype is not None and not _is_float(group.dtype):
        return f"has a wrong dtype: expected a float type of torch, got {shorten(group.dtype)}"
    if isinstance(layout, LatentKV):
        if 0 <= layout.rope_dim < layout.dim:
            return ""
        return (
            f"has a wrong rope_dim: expected 0 or more, and less than dim {layout.dim}, got "
            f"{layout.rope_dim}"
        )
    if isinstance(layout, StateKV):
        names = [tensor.name for tensor in layout.tensors]
        if not names or len(set(names)) < len(names):
            return (
                f"has a wrong state: expected one or more tensors with different names, got {names}"
            )
        strange = [
            tensor.dtype
            for tensor in layout.tensors
            if tensor.dtype is not None and not _is_float(tensor.dtype)
        ]
        if strange:
            return f"has a wrong state: expected a float type of torch, got {shorten(strange[0])}"
        small = [tensor.name for tensor in layout.tensors if min(tensor.shape, default=0) < 1]
        return f"has a state tensor {small[0]!r} without elements" if small else ""
    if not isinstance(layout, FullKV):
        return (
            f"has a wrong layout: expected FullKV, LatentKV or StateKV, got {type(layout).__name__}"
        )
    # The operations take the widths of queries, keys and values from the layers. A backend is told
    # the heads of the whole group.
    sizes = [model.sizes_of(model.layers[index]) for index in group.layers]
    heads = sorted({each.heads for each in sizes})
    if len(heads) > 1:
        return f"has wrong heads of its layers: expected one number, got {heads[0]} and {heads[1]}"
    shapes = (
        FullKV(kv_heads=each.kv_heads, k_dim=each.head_dim, v_dim=each.head_dim) for each in sizes
    )
    wanted = next((shape for shape in shapes if layout != shape), None)
    return f"has a wrong layout: expected {wanted}, got {layout}" if wanted else ""


def _is_float(name: str) -> bool:
    """Whether this is the name of a floating-point type of torch."""
    dtype = getattr(torch, name, None)
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point
