"""Scales of 8-bit keys and values, as checkpoints store them beside the maps that make these."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from attrs import frozen
from safetensors import SafetensorError

from headstock.errors import ModelError, shorten
from headstock.spi import ModelConfig, ParamSpec
from headstock.weights.quantization import KEY_SCALES, KEY_VALUE_SCALES, VALUE_SCALES
from headstock.weights.reader import CheckpointReader
from headstock.weights.stored_tensors import find_parts_left_out

_FLOAT_DTYPES = ("F32", "F16", "BF16")
_SCALAR_SHAPES = ((), (1,))
_NEXT = "set kv_dtype (--kv-dtype) to auto, which needs no scales"


@frozen
class KVScales:
    """What the keys and the values of a layer are divided by before they are stored."""

    k: float
    v: float


def list_kv_scales(directory: Path, specs: Mapping[str, ParamSpec]) -> tuple[str, ...]:
    """List the tensors that scale keys and values, from headers alone.   raises: ModelError"""
    with CheckpointReader.open(directory, None, specs) as checkpoint:
        return tuple(_list_names(checkpoint, specs))


def read_kv_scales(
    directory: Path, specs: Mapping[str, ParamSpec], model: ModelConfig
) -> Mapping[int, KVScales]:
    """Read the scales of each layer that has them, by its number.

    specs: the parameters of the whole model
    raises: ModelError for scales that are no positive finite numbers, that lack the other side, or
        that belong to no layer
    """
    with CheckpointReader.open(directory, None, specs) as checkpoint:
        left = set(_list_names(checkpoint, specs))
        found: dict[int, KVScales] = {}
        for layer in model.layers:
            module = _find_module(specs, layer.prefix)
            names = sorted(name for name in left if module and name.startswith(module))
            left.difference_update(names)
            keys, values = (
                [name for name in names if name.endswith((*ends, *KEY_VALUE_SCALES))]
                for ends in (KEY_SCALES, VALUE_SCALES)
            )
            for twice in (side for side in (keys, values) if len(side) > 1):
                raise ModelError(
                    f"{shorten(twice[0])} and {shorten(twice[1])} in {directory} scale the same "
                    f"numbers; {_NEXT}"
                )
            if bool(keys) != bool(values):
                has, lacks = ("keys", "values") if keys else ("values", "keys")
                raise ModelError(
                    f"{shorten((keys or values)[0])} in {directory} scales {has}, and the {lacks} "
                    f"of its layer have no scale; {_NEXT}"
                )
            if keys:
                scales = KVScales(*(_read_scale(checkpoint, side[0]) for side in (keys, values)))
                if layer.latent is not None and scales.k != scales.v:
                    raise ModelError(
                        f"{shorten(keys[0])} in {directory} is {scales.k:g} and "
                        f"{shorten(values[0])} is {scales.v:g}, but keys and values of the layer "
                        f"are one vector, which has one scale; {_NEXT}"
                    )
                found[layer.index] = scales
        if left:
            raise ModelError(
                f"{shorten(min(left))} in {directory} scales keys or values of no layer of the "
                f"model; {_NEXT}"
            )
    return found


def _list_names(checkpoint: CheckpointReader, specs: Mapping[str, ParamSpec]) -> Iterator[str]:
    """List the tensors that scale keys and values of parts that are computed."""
    left_out = find_parts_left_out(checkpoint.entries, specs.values())
    ends = (*KEY_SCALES, *VALUE_SCALES, *KEY_VALUE_SCALES)
    for name in checkpoint.entries:
        if name.endswith(ends) and name not in left_out:
            yield name


def _find_module(specs: Mapping[str, ParamSpec], prefix: str) -> str:
    """The beginning of the names of a layer's attention; empty where it has none of its own."""
    for name in ("qkv", "latent"):
        spec = specs.get(f"{prefix}{name}")
        if spec is not None and spec.sources:
            # MODULE.q_proj.weight
            return spec.sources[0][0].rsplit(".", 2)[0] + "."
    return ""


def _read_scale(checkpoint: CheckpointReader, name: str) -> float:
    """Read the one number of a tensor.   raises: ModelError"""
    entry, where = checkpoint.entries[name], f"{shorten(name)} in {checkpoint.directory}"
    if entry.shape not in _SCALAR_SHAPES or entry.dtype not in _FLOAT_DTYPES:
        raise ModelError(
            f"{where}: expected one number ({', '.join(_FLOAT_DTYPES)}), got shape "
            f"{list(entry.shape)} of {entry.dtype}; {_NEXT}"
        )
    try:
        scale = float(checkpoint.read(name))
    except (SafetensorError, OSError) as error:
        raise ModelError(f"cannot read {where}: {shorten(error)}") from error
    if not (math.isfinite(scale) and scale > 0):
        raise ModelError(f"{where}: expected a finite number above 0, got {scale:g}; {_NEXT}")
    return scale
