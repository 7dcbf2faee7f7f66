"""The formats of compressed-tensors: FP8, INT8, INT4 and FP4, by what the file stores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from headstock.errors import ModelError, describe_type, shorten
from headstock.spi import WeightFormat, WeightKind
from headstock.weights.quantization.fp4 import find_fp4
from headstock.weights.quantization.fp8 import read_block
from headstock.weights.quantization.integers import KINDS, find_word_columns
from headstock.weights.quantization.reader import (
    PackedTensor,
    PackedTensors,
    QuantReader,
    check_choice,
    check_leftovers,
    find_ignored_fields,
    find_kv_numbers,
    find_unread,
)
from headstock.weights.quantization.scaled import KINDS as STORED_KINDS
from headstock.weights.quantization.scaled import find_scaled
from headstock.weights.safetensors_header import TensorEntry

_FORMATS = (
    *("dense", "naive-quantized", "float-quantized", "int-quantized", "pack-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mixed-precision"),
)
# Which modules are packed the file says, so neither `ignore` nor `targets` is read.
_FIELDS = (
    *("quant_method", "format", "config_groups", "ignore", "kv_cache_scheme", "version"),
    *("quantization_status", "global_compression_ratio", "sparsity_config", "transform_config"),
)
_STRATEGIES = ("tensor", "channel", "token", "group", "block", "tensor_group")
_PACKED = ".weight_packed"


@frozen
class CompressedTensorsReader(QuantReader):
    """X.weight or X.weight_packed, and X.weight_scale.

    formats: of the groups of the configuration
    """

    formats: tuple[WeightFormat, ...]
    ignored_fields: tuple[str, ...]
    kv_numbers: str = ""

    @property
    def summary(self) -> str:  # type: ignore[override]
        """The format in words."""
        kinds = dict.fromkeys(format.kind.name.partition("_")[0] for format in self.formats)
        return f"compressed-tensors ({', '.join(kinds)})"

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> CompressedTensorsReader:
        """Read the configuration.   raises: ValueError with the field, expected and got"""
        check_choice(fields, "format", _FORMATS)
        for name in ("sparsity_config", "transform_config"):
            value = fields.get(name) or {}
            if value and not (isinstance(value, Mapping) and value.get("format") == "dense"):
                raise ValueError(
                    f"{name}: expected nothing, got {shorten(repr(value))}; use a checkpoint "
                    "without it"
                )
        groups = fields.get("config_groups") or {}
        if not isinstance(groups, Mapping):
            raise ValueError(f"config_groups: expected an object, got {describe_type(groups)}")
        formats = [_read_group(f"config_groups.{name}", each) for name, each in groups.items()]
        found = tuple(dict.fromkeys(each for each in formats if each is not None))
        packed = {each.kind for each in found if each.kind in KINDS.values()}
        if fields.get("format") == "pack-quantized" and len(packed) > 1:
            raise ValueError("config_groups: expected one number of bits, got 4 and 8")
        if not found and not fields.get("kv_cache_scheme"):
            raise ValueError("config_groups: expected weights in one of them, got none")
        return cls(found, find_ignored_fields(fields, _FIELDS), find_kv_numbers(fields))

    def sort(self, entries: Mapping[str, TensorEntry]) -> PackedTensors:
        """See `QuantReader.sort`."""
        packed = {}
        for name, entry in entries.items():
            if name.endswith(_PACKED):
                whole = name.removesuffix("_packed")
                if whole in entries:
                    raise ModelError(f"{shorten(whole)} is there twice, with {shorten(name)}")
                packed[whole] = self._find_packed(name, entries)
            elif entry.dtype in STORED_KINDS and name.endswith(".weight"):
                blocks = [each.group for each in self.formats if each.group and each.group[0] > 1]
                packed[name] = find_scaled(name, entries, blocks[0] if blocks else None)
        owners = {
            ".weight_global_scale": _PACKED,
            ".weight_shape": _PACKED,
            ".weight_g_idx": _PACKED,
            ".weight_zero_point": ".weight",
            ".weight_scale": ".weight",
        }
        check_leftovers(entries, packed, owners)
        return PackedTensors(packed, find_unread(entries))

    def _find_packed(self, name: str, entries: Mapping[str, TensorEntry]) -> PackedTensor:
        """Find what belongs to a `weight_packed`.   raises: ModelError"""
        owner = name.removesuffix("_packed")
        if f"{owner}_g_idx" in entries:
            raise ModelError(
                f"{shorten(owner)}_g_idx is there: columns in another order are read of GPTQ "
                "alone; use another checkpoint of the model"
            )
        if entries[name].dtype == "U8":
            overall = f"{owner}_global_scale"
            return find_fp4(
                name,
                entries,
                f"{owner}_scale",
                overall if overall in entries else None,
                is_divided=True,
            )
        words = [each for each in self.formats if each.kind in KINDS.values()]
        if not words:
            raise ModelError(f"{shorten(name)} packs integers, and config_groups has none")
        bits = next(bits for bits, kind in KINDS.items() if kind is words[0].kind)
        groups = [-1 if each.group is None else each.group[1] for each in words]
        return find_word_columns(name, entries, bits, groups)


def _read_group(name: str, group: object) -> WeightFormat | None:
    """The format of the weights of a group; None where they are plain.   raises: ValueError"""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if weights is None:
        return None
    if not isinstance(weights, Mapping):
        raise ValueError(f"{name}.weights: expected an object, got {describe_type(weights)}")
    try:
        check_choice(weights, "type", ("float", "int"))
        check_choice(weights, "num_bits", (4, 8))
        check_choice(weights, "strategy", _STRATEGIES)
        check_choice(weights, "actorder", ("weight", "static", "group", False))
        is_float, bits = weights.get("type", "int") == "float", weights.get("num_bits", 8)
        kind = {4: WeightKind.FP4_E2M1, 8: WeightKind.FP8_E4M3}[bits] if is_float else KINDS[bits]
        size, block = weights.get("group_size"), weights.get("block_structure")
        if weights.get("strategy") == "block" and block is not None:
            return WeightFormat(kind=kind, group=read_block(block))
        if size is not None and (type(size) is not int or not (size == -1 or size > 0)):
            raise ValueError(f"group_size: expected -1 or a number above 0, got {size!r}")
    except ValueError as error:
        raise ValueError(f"{name}.weights.{error}") from error
    is_symmetric = weights.get("symmetric", True)
    return WeightFormat(
        kind=kind, group=(1, size) if size and size > 0 else None, has_zeros=not is_symmetric
    )
