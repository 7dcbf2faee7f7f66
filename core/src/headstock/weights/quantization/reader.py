"""Readers of quantized checkpoints: which tensors pack others, and in which format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from attrs import frozen
from torch import Tensor

from headstock.errors import ModelError, shorten
from headstock.spi import Weight, WeightFormat
from headstock.weights.safetensors_header import TensorEntry

Unpack = Callable[[Sequence[Tensor]], Weight]
"""Makes the packed weight of its stored tensors.   raises: ValueError for numbers that cannot be"""

_ABSENT: tuple[object, ...] = (None, False, "", (), [], {})

KEY_SCALES = (".k_scale", ".k_proj.output_scale", ".k_cache.scale")
VALUE_SCALES = (".v_scale", ".v_proj.output_scale", ".v_cache.scale")
KEY_VALUE_SCALES = (".kv_scale",)
"""Endings of the names of tensors that scale keys, values, and both."""

UNREAD_SUFFIXES = (
    # Of activations, which are not quantized by numbers of the file.
    *(".input_scale", ".input_zero_point", ".input_global_scale", ".activation_scale"),
    *(".q_scale", ".prob_scale"),
    # Of keys and values, which `read_kv_scales` reads.
    *(*KEY_SCALES, *VALUE_SCALES, *KEY_VALUE_SCALES),
)


@frozen
class PackedTensor:
    """A tensor that others stand for.

    entry: what it is, as the model has it
    sources: the tensors that it is made of, the one with its numbers first
    unpack: makes the weight of these
    is_swapped: whether that has the last two dimensions of the entry swapped
    may_reorder: whether columns may be stored in another order
    """

    format: WeightFormat
    entry: TensorEntry
    sources: tuple[str, ...]
    unpack: Unpack
    is_swapped: bool = False
    may_reorder: bool = False


@frozen
class PackedTensors:
    """The tensors of a checkpoint by what they are for; `unread` are not used here."""

    packed: Mapping[str, PackedTensor]
    unread: frozenset[str]


class QuantReader(ABC):
    """Knows the tensors of one method.

    summary: the format in words
    ignored_fields: fields of the configuration that are not read
    kv_numbers: what the configuration has scales of keys and values for; empty where it says FP8
        with one scale, or nothing
    packs_experts_alone: whether other matrices are never packed
    """

    summary: str
    ignored_fields: tuple[str, ...]
    kv_numbers: str = ""
    packs_experts_alone: bool = False

    @property
    @abstractmethod
    def formats(self) -> tuple[WeightFormat, ...]:
        """The formats that its matrices may have, as far as the configuration says."""

    @abstractmethod
    def sort(self, entries: Mapping[str, TensorEntry]) -> PackedTensors:
        """Find packed tensors, and what they are made of.

        raises: ModelError for tensors that are missing, left over or of a wrong shape or dtype
        """


def find_unread(entries: Mapping[str, TensorEntry]) -> frozenset[str]:
    """Find the tensors that scale activations, keys and values."""
    return frozenset(name for name in entries if name.endswith(UNREAD_SUFFIXES))


def find_ignored_fields(fields: Mapping[str, Any], read: Collection[str]) -> tuple[str, ...]:
    """Find the fields that say something and are not read."""
    return tuple(
        name for name, value in fields.items() if name not in read and value not in _ABSENT
    )


def find_kv_numbers(fields: Mapping[str, Any]) -> str:
    """Find what scales of keys and values are for; empty for FP8 with one scale, or no word.

    raises: ValueError
    """
    algorithm, scheme = fields.get("kv_cache_quant_algo"), fields.get("kv_cache_scheme")
    if algorithm not in (None, "", "FP8"):
        return f"kv_cache_quant_algo {shorten(repr(algorithm))}"
    if scheme is None:
        return ""
    if not isinstance(scheme, Mapping):
        raise ValueError(f"kv_cache_scheme: expected an object, got {shorten(repr(scheme))}")
    for name, wanted in (("type", "float"), ("num_bits", 8), ("strategy", "tensor")):
        if scheme.get(name) not in (None, wanted):
            return f"kv_cache_scheme.{name} {shorten(repr(scheme[name]))}"
    return ""


def read_names(fields: Mapping[str, Any], *names: str) -> tuple[str, ...]:
    """Join the lists of module names that the fields hold.   raises: ValueError"""
    lists = [fields.get(name) or () for name in names]
    for name, value in zip(names, lists, strict=True):
        if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
            raise ValueError(f"{name}: expected a list of module names, got {shorten(repr(value))}")
    return tuple(module for each in lists for module in each)


def check_choice(fields: Mapping[str, Any], name: str, allowed: Sequence[object]) -> None:
    """Check that the field is absent or has one of the values.   raises: ValueError"""
    value = fields.get(name)
    if value is not None and not any(value is each or value == each for each in allowed):
        wanted = " or ".join(map(str, allowed))
        raise ValueError(f"{name}: expected {wanted}, got {shorten(repr(value))}")


def check_plain(name: str, module: str, *, is_plain: bool, stored: str) -> None:
    """Check that the configuration does not call a packed module plain.   raises: ModelError"""
    if is_plain:
        raise ModelError(
            f"{shorten(name)} is {stored}, but quantization_config says that {shorten(module)} is "
            "not quantized"
        )


def find_source(
    name: str,
    entries: Mapping[str, TensorEntry],
    beside: str,
    dtypes: Collection[str],
    shapes: Sequence[tuple[int, ...]],
) -> TensorEntry:
    """Find a tensor that belongs to another one, and check it.

    beside: the tensor that it belongs to, with what that is
    shapes: that it may have, the usual one first
    raises: ModelError
    """
    if name not in entries:
        raise ModelError(f"{beside}, and {shorten(name)} is missing")
    entry = entries[name]
    if entry.shape not in shapes:
        raise ModelError(
            f"{shorten(name)}: expected shape {list(shapes[0])}, got {list(entry.shape)}; {beside}"
        )
    if entry.dtype not in dtypes:
        raise ModelError(
            f"{shorten(name)}: expected one of {', '.join(sorted(dtypes))}, got {entry.dtype}"
        )
    return entry


def check_leftovers(
    entries: Mapping[str, TensorEntry],
    packed: Mapping[str, PackedTensor],
    owners: Mapping[str, str],
) -> None:
    """Check that every tensor that serves others is used.

    owners: endings of names that serve others, each with the ending of what they serve
    raises: ModelError
    """
    used = {source for each in packed.values() for source in each.sources}
    for name, entry in entries.items():
        end = next((end for end in owners if name.endswith(end)), None)
        if end is None or name in used:
            continue
        owner = name.removesuffix(end) + owners[end]
        if owner in entries:
            raise ModelError(
                f"{shorten(name)} is there, but {shorten(owner)} is {entries[owner].dtype} and "
                "needs none"
            )
        raise ModelError(
            f"{shorten(name)} ({entry.dtype}) is there, and {shorten(owner)} is missing"
        )
