"""Numbers of FP4: MXFP4 as GPT-OSS publishes its experts, and what packs it elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor

from headstock.errors import ModelError, shorten
from headstock.spi import Weight, WeightFormat, WeightKind
from headstock.weights.quantization.reader import (
    PackedTensor,
    PackedTensors,
    QuantReader,
    check_leftovers,
    check_plain,
    find_ignored_fields,
    find_source,
    read_names,
)
from headstock.weights.quantization.scaled import check_finite, check_positive
from headstock.weights.safetensors_header import TensorEntry

_BLOCKS, _SCALES = "_blocks", "_scales"
_BLOCK_BYTES = 16
_MXFP4 = WeightFormat(kind=WeightKind.FP4_E2M1, group=(1, 2 * _BLOCK_BYTES))
_NVFP4 = WeightFormat(kind=WeightKind.FP4_E2M1, group=(1, 16))


@frozen
class Mxfp4Reader(QuantReader):
    """X_blocks, of 16 bytes each, and X_scales.

    X is [experts, inputs, outputs]. Both tensors have the outputs first; a block is 32 inputs.

    plain_modules: patterns of the modules whose weights are not quantized
    """

    plain_modules: tuple[str, ...]
    ignored_fields: tuple[str, ...]
    summary = "MXFP4"
    packs_experts_alone = True

    @property
    def formats(self) -> tuple[WeightFormat, ...]:
        """Numbers of 4 bits with a scale for 32 of a row."""
        return (_MXFP4,)

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Mxfp4Reader:
        """Read the configuration.   raises: ValueError with the field, expected and got"""
        known = ("quant_method", "modules_to_not_convert", "dequantize")
        names = read_names(fields, "modules_to_not_convert")
        return cls(names, find_ignored_fields(fields, known))

    def sort(self, entries: Mapping[str, TensorEntry]) -> PackedTensors:
        """See `QuantReader.sort`."""
        packed = {
            name.removesuffix(_BLOCKS): self._pack(name, entry, entries)
            for name, entry in entries.items()
            if name.endswith(_BLOCKS)
        }
        check_leftovers(entries, packed, {_SCALES: _BLOCKS})
        return PackedTensors(packed, frozenset())

    def _pack(
        self, blocks: str, entry: TensorEntry, entries: Mapping[str, TensorEntry]
    ) -> PackedTensor:
        """Find the scales of a tensor's blocks, and check both.   raises: ModelError"""
        name = blocks.removesuffix(_BLOCKS)
        scales = name + _SCALES
        is_plain = any(
            fnmatchcase(name, end) for each in self.plain_modules for end in (each, each + ".*")
        )
        check_plain(blocks, name, is_plain=is_plain, stored="there")
        if name in entries:
            raise ModelError(f"{shorten(name)} is there twice, with {shorten(blocks)}")
        if entry.dtype != "U8" or len(entry.shape) != 4 or entry.shape[-1] != _BLOCK_BYTES:
            raise ModelError(
                f"{shorten(blocks)}: expected U8 of shape [experts, outputs, inputs / 32, "
                f"{_BLOCK_BYTES}], got {entry.dtype} of {list(entry.shape)}"
            )
        beside = f"{shorten(blocks)} is there"
        find_source(scales, entries, beside, ("U8", "F8_E8M0"), [entry.shape[:-1]])

        def unpack(stored: Sequence[Tensor]) -> Weight:
            values, powers = stored
            return Weight(
                tensor=values.flatten(-2), scales=read_powers(scales, powers), format=_MXFP4
            )

        experts, outputs, groups, _ = entry.shape
        return PackedTensor(
            _MXFP4,
            evolve(entry, shape=(experts, groups * 2 * _BLOCK_BYTES, outputs)),
            (blocks, scales),
            unpack,
            is_swapped=True,
        )


def find_fp4(
    name: str,
    entries: Mapping[str, TensorEntry],
    scales: str,
    overall: str | None = None,
    *,
    is_divided: bool = False,
) -> PackedTensor:
    """Find the scales of a tensor that packs FP4, two in a byte.

    scales: the tensor with a scale for 16 columns in FP8, or for 32 as a power of two
    overall: the tensor with the scale of all; none for powers of two
    is_divided: whether numbers are divided by that
    raises: ModelError
    """
    entry = entries[name]
    if entry.dtype != "U8" or len(entry.shape) < 2:
        raise ModelError(
            f"{shorten(name)}: expected U8 of shape [outputs, inputs / 2], got {entry.dtype} of "
            f"{list(entry.shape)}"
        )
    columns, beside = 2 * entry.shape[-1], f"{shorten(name)} is U8"
    format = _MXFP4 if overall is None else _NVFP4
    assert format.group is not None
    shape = (*entry.shape[:-1], -(-columns // format.group[1]))
    dtypes = ("U8", "F8_E8M0") if overall is None else ("F8_E4M3",)
    find_source(scales, entries, beside, dtypes, [shape])
    if overall is not None:
        find_source(overall, entries, beside, ("F32",), [(1,), ()])

    def unpack(stored: Sequence[Tensor]) -> Weight:
        values, found, *rest = stored
        if overall is None:
            return Weight(tensor=values, scales=read_powers(scales, found), format=format)
        factor = check_positive(overall, rest[0]).reshape(())
        # A block of zeros has a scale of 0 here.
        factors = check_finite(scales, found) * (factor.reciprocal() if is_divided else factor)
        return Weight(tensor=values, scales=factors, format=format)

    sources = (name, scales) if overall is None else (name, scales, overall)
    whole = evolve(entry, shape=(*entry.shape[:-1], columns))
    return PackedTensor(format, whole, sources, unpack)


def read_powers(name: str, powers: Tensor) -> Tensor:
    """The scales that exponents stand for, in float32.   raises: ValueError for NaN"""
    if powers.dtype is torch.uint8:  # a type that safetensors had no name for
        powers = powers.view(torch.float8_e8m0fnu)
    return check_positive(name, powers)
