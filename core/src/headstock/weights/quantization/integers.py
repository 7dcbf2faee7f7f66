"""Integers of 4 and 8 bits that words of 32 pack: GPTQ, AWQ, and those of compressed-tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    check_choice,
    check_leftovers,
    find_ignored_fields,
    find_source,
    find_unread,
)
from headstock.weights.quantization.scaled import check_finite
from headstock.weights.safetensors_header import TensorEntry

KINDS = {4: WeightKind.INT4, 8: WeightKind.INT8}
_WORDS, _FLOATS = ("I32",), ("F16", "BF16", "F32")
_GPTQ_FIELDS = (
    *("quant_method", "bits", "group_size", "sym", "checkpoint_format", "desc_act", "dynamic"),
    *("is_marlin_format", "pack_dtype", "lm_head"),
    # How it was made, and how others run it.
    *("damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "meta"),
    *("model_name_or_path", "model_file_base_name", "quantizer", "tokenizer", "dataset"),
    *("modules_in_block_to_quantize", "block_name_to_quantize", "batch_size", "pad_token_id"),
    *("module_name_preceding_first_block", "model_seqlen", "cache_block_outputs", "backend"),
    *("use_exllama", "disable_exllama", "exllama_config", "max_input_length", "use_cuda_fp16"),
)
_AWQ_FIELDS = (
    *("quant_method", "bits", "w_bit", "group_size", "q_group_size", "zero_point", "version"),
    *("modules_to_not_convert", "backend", "do_fuse", "fuse_max_seq_len", "modules_to_fuse"),
    "exllama_config",
)
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word of AWQ each of eight columns lies, in fours of bits from the lowest."""


def find_word_columns(
    name: str, entries: Mapping[str, TensorEntry], bits: int, groups: Sequence[int]
) -> PackedTensor:
    """Find what belongs to a `weight_packed` of compressed-tensors: words along a row.

    groups: how many columns may share a scale; -1 for all of a row
    raises: ModelError
    """
    entry, owner, beside = entries[name], name.removesuffix("_packed"), f"{shorten(name)} is there"
    rows, words = _check_words(name, entry)
    columns = words * 32 // bits
    shapes: dict[tuple[int, ...], int] = {
        (rows, -(-columns // size)): size for size in _list_sizes(groups, columns)
    }
    found = find_source(f"{owner}_scale", entries, beside, _FLOATS, list(shapes))
    sources = {"values": name, "scales": f"{owner}_scale"}
    if f"{owner}_shape" in entries:
        find_source(f"{owner}_shape", entries, beside, ("I64", "I32"), [(2,)])
        sources["shape"] = f"{owner}_shape"
    has_zeros = f"{owner}_zero_point" in entries
    if has_zeros:
        sources["zeros"] = f"{owner}_zero_point"
        packed = (-(-rows * bits // 32), found.shape[1])
        find_source(sources["zeros"], entries, beside, _WORDS, [packed])
    format = WeightFormat(kind=KINDS[bits], group=(1, shapes[found.shape]), has_zeros=has_zeros)

    def unpack(stored: Sequence[Tensor]) -> Weight:
        tensors = dict(zip(sources, stored, strict=True))
        if "shape" in tensors and tensors["shape"].tolist() != [rows, columns]:
            raise ValueError(
                f"{sources['shape']}: expected {[rows, columns]}, got {tensors['shape'].tolist()}"
            )
        zeros = None
        if has_zeros:
            zeros = _center(split_words(tensors["zeros"].t(), bits).t()[:rows], bits)
        return Weight(
            tensor=_center(tensors["values"].contiguous().view(torch.uint8), bits),
            scales=check_finite(sources["scales"], tensors["scales"]),
            zeros=zeros,
            format=format,
        )

    whole = evolve(entry, shape=(rows, columns))
    return PackedTensor(format, whole, tuple(sources.values()), unpack)


@frozen
class WordReader(QuantReader):
    """X.qweight, X.scales and X.qzeros, of GPTQ and AWQ.

    bits: of a number
    group: columns that share a scale; -1 for whole rows
    may_reorder: whether columns of a group may lie apart
    has_rules: whether modules may have other bits and groups, which only their tensors say
    is_symmetric: whether zeros are half of the range
    zero_offset: what is added to stored zeros
    """

    method: str
    bits: int
    group: int
    may_reorder: bool
    has_rules: bool
    is_symmetric: bool
    zero_offset: int
    ignored_fields: tuple[str, ...]

    @property
    def summary(self) -> str:  # type: ignore[override]
        """The format in words."""
        groups = "" if self.group < 0 else f", groups of {self.group}"
        return f"{self.method} (INT{self.bits}{groups})"

    @property
    def formats(self) -> tuple[WeightFormat, ...]:
        """Integers with a scale for a group of columns."""
        group = (1, self.group) if self.group > 0 else None
        return (WeightFormat(kind=KINDS[self.bits], group=group, has_zeros=not self.is_symmetric),)

    @classmethod
    def parse_gptq(cls, fields: Mapping[str, Any]) -> WordReader:
        """Read the configuration of GPTQ.   raises: ValueError with the field, expected and got"""
        check_choice(fields, "checkpoint_format", ("gptq", "gptq_v2"))
        check_choice(fields, "is_marlin_format", (False,))
        check_choice(fields, "pack_dtype", ("int32",))
        return cls(
            "GPTQ",
            _read_bits(fields, "bits"),
            _read_group(fields, "group_size"),
            may_reorder=bool(fields.get("desc_act")),
            has_rules=bool(fields.get("dynamic")),
            is_symmetric=bool(fields.get("sym", True)),
            zero_offset=0 if fields.get("checkpoint_format") == "gptq_v2" else 1,
            ignored_fields=find_ignored_fields(fields, _GPTQ_FIELDS),
        )

    @classmethod
    def parse_awq(cls, fields: Mapping[str, Any]) -> WordReader:
        """Read the configuration of AWQ.   raises: ValueError with the field, expected and got"""
        check_choice(fields, "version", ("gemm", "GEMM"))
        bits = "w_bit" if "w_bit" in fields else "bits"
        check_choice(fields, bits, (4,))
        return cls(
            "AWQ",
            _read_bits(fields, bits),
            _read_group(fields, "q_group_size" if "q_group_size" in fields else "group_size"),
            may_reorder=False,
            has_rules=False,
            is_symmetric=not fields.get("zero_point", True),
            zero_offset=0,
            ignored_fields=find_ignored_fields(fields, _AWQ_FIELDS),
        )

    def sort(self, entries: Mapping[str, TensorEntry]) -> PackedTensors:
        """See `QuantReader.sort`."""
        pack = self._pack_awq if self.method == "AWQ" else self._pack_gptq
        packed = {
            name.removesuffix("qweight") + "weight": pack(name, entries)
            for name in entries
            if name.endswith(".qweight")
        }
        for name in packed:
            if name in entries:
                raise ModelError(f"{shorten(name)} is there twice, with {name[:-6]}qweight")
        owners = {".qzeros": ".qweight", ".g_idx": ".qweight", ".scales": ".qweight"}
        check_leftovers(entries, packed, owners)
        return PackedTensors(packed, find_unread(entries))

    def _pack_awq(self, name: str, entries: Mapping[str, TensorEntry]) -> PackedTensor:
        """Find what belongs to words along the outputs.   raises: ModelError"""
        inputs, words = _check_words(name, entries[name])
        shape = (words * 32 // self.bits, inputs)
        format, sources = self._find_beside(name, entries, self.bits, shape)
        if "order" in sources:
            raise ModelError(f"{shorten(sources['order'])} is there, which AWQ does not have")

        def unpack(stored: Sequence[Tensor]) -> Weight:
            tensors = dict(zip(sources, stored, strict=True))
            zeros = tensors.get("zeros")
            return Weight(
                tensor=pack_halves(split_words(tensors["values"], self.bits, _AWQ_ORDER).t()),
                scales=check_finite(sources["scales"], tensors["scales"]).t(),
                zeros=None
                if zeros is None or not format.has_zeros
                else split_words(zeros, self.bits, _AWQ_ORDER).t().to(torch.int8),
                format=format,
            )

        whole = evolve(entries[name], shape=shape)
        return PackedTensor(format, whole, tuple(sources.values()), unpack)

    def _pack_gptq(self, name: str, entries: Mapping[str, TensorEntry]) -> PackedTensor:
        """Find what belongs to words along the inputs.   raises: ModelError"""
        words, outputs = _check_words(name, entries[name])
        bits, order = self.bits, entries.get(name.removesuffix("qweight") + "g_idx")
        if self.has_rules and order is not None and order.shape and order.shape[0]:
            bits = words * 32 // order.shape[0]
            if bits not in KINDS:
                raise ModelError(f"{shorten(name)}: expected 4 or 8 bits, got {bits}")
        shape = (outputs, words * 32 // bits)
        format, sources = self._find_beside(name, entries, bits, shape)

        def unpack(stored: Sequence[Tensor]) -> Weight:
            tensors = dict(zip(sources, stored, strict=True))
            zeros, places = None, None
            if "zeros" in tensors:
                zeros = self._read_zeros(sources["zeros"], tensors["zeros"], bits)
            values = split_words(tensors["values"].t(), bits)
            if "order" in tensors:
                places = _read_order(sources["order"], tensors["order"], format, shape[1])
                if places is not None and not self.may_reorder:
                    raise ValueError(
                        f"{sources['order']}: expected columns in order, as desc_act is false, got "
                        "others"
                    )
            if places is not None:
                values = values[:, places]
            return Weight(
                tensor=_center(values, bits) if bits == 8 else pack_halves(values),
                scales=check_finite(sources["scales"], tensors["scales"]).t(),
                zeros=None if zeros is None else zeros.t(),
                order=places,
                format=format,
            )

        whole = evolve(entries[name], shape=shape)
        has_order = self.may_reorder and "order" in sources
        return PackedTensor(format, whole, tuple(sources.values()), unpack, may_reorder=has_order)

    def _find_beside(
        self, name: str, entries: Mapping[str, TensorEntry], bits: int, shape: tuple[int, int]
    ) -> tuple[WeightFormat, dict[str, str]]:
        """Find scales, zeros and the order of columns, by what they are.   raises: ModelError"""
        (outputs, inputs), beside = shape, f"{shorten(name)} is there"
        scales, zeros, order = (
            name.removesuffix("qweight") + end for end in ("scales", "qzeros", "g_idx")
        )
        allowed = [self.group]
        if self.has_rules and scales in entries and entries[scales].shape:
            allowed.append(-(-inputs // max(1, entries[scales].shape[0])))
        shapes: dict[tuple[int, ...], int] = {
            (-(-inputs // size), outputs): size for size in _list_sizes(allowed, inputs)
        }
        found = find_source(scales, entries, beside, _FLOATS, list(shapes))
        sources = {"values": name, "scales": scales}
        if zeros in entries or not self.is_symmetric:
            packed = (found.shape[0], -(-outputs * bits // 32))
            find_source(zeros, entries, beside, _WORDS, [packed])
            sources["zeros"] = zeros
        if order in entries:
            find_source(order, entries, beside, ("I32", "I64"), [(inputs,)])
            sources["order"] = order
        group = (1, shapes[found.shape])
        return (
            WeightFormat(kind=KINDS[bits], group=group, has_zeros=not self.is_symmetric),
            sources,
        )

    def _read_zeros(self, name: str, words: Tensor, bits: int) -> Tensor | None:
        """The zeros of GPTQ, [groups, outputs]; None for half of the range.

        raises: ValueError where that is said and others are stored
        """
        half, stored = 1 << bits - 1, split_words(words, bits)
        if not self.is_symmetric:
            return _center((stored + self.zero_offset) & (2 * half - 1), bits)
        # Releases of GPTQModel wrote the second edition's zeros and called them the first one's.
        if not any(bool((stored == each).all()) for each in (half, half - 1)):
            raise ValueError(f"{name}: expected zeros of {half}, as sym is true, got others")
        return None


def _check_words(name: str, entry: TensorEntry) -> tuple[int, int]:
    """The shape of words.   raises: ModelError"""
    if entry.dtype not in _WORDS or len(entry.shape) != 2:
        raise ModelError(
            f"{shorten(name)}: expected I32 of two dimensions, got {entry.dtype} of "
            f"{list(entry.shape)}"
        )
    return entry.shape[0], entry.shape[1]


def _list_sizes(groups: Sequence[int], columns: int) -> list[int]:
    """The columns of a group, where -1 is all."""
    return [columns if size < 0 else size for size in groups] or [columns]


def _read_order(name: str, groups: Tensor, format: WeightFormat, columns: int) -> Tensor | None:
    """Which column is at each place when those of a group lie together; None if they do.

    raises: ValueError for groups that are not full
    """
    assert format.group is not None
    plain, groups = torch.arange(columns) // format.group[1], groups.long()
    if torch.equal(groups, plain):
        return None
    order = torch.argsort(groups, stable=True)
    if not torch.equal(groups[order], plain):
        raise ValueError(f"{name}: expected {format.group[1]} columns of each group, got others")
    return order


def _read_bits(fields: Mapping[str, Any], name: str) -> int:
    """The bits of a number.   raises: ValueError"""
    bits = fields.get(name)
    if type(bits) is not int or bits not in KINDS:
        raise ValueError(f"{name}: expected 4 or 8, got {shorten(repr(bits))}")
    return bits


def _read_group(fields: Mapping[str, Any], name: str) -> int:
    """The columns of a group; -1 for all.   raises: ValueError"""
    size = fields.get(name, -1)
    if type(size) is not int or not (size == -1 or size > 0):
        raise ValueError(f"{name}: expected -1 or a number above 0, got {shorten(repr(size))}")
    return size


def split_words(words: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """The numbers of words along the last dimension, lowest bits first.

    words: [rows, words] int32    returns: [rows, words * 32 / bits] uint8
    order: where each number of a word lies; None for one after the other
    """
    parts = words.contiguous().view(torch.uint8)
    if bits == 4:
        parts = torch.stack((parts & 15, parts >> 4), -1).flatten(-2)
    if order is not None:
        parts = parts.reshape(len(parts), -1, len(order))[..., list(order)].flatten(-2)
    return parts


def pack_halves(values: Tensor) -> Tensor:
    """Numbers of 4 bits, two in a byte, the first one in its lower half.   values: uint8"""
    if values.shape[-1] % 2:
        values = torch.nn.functional.pad(values, (0, 1))
    return values[..., ::2] | values[..., 1::2] << 4


def _center(stored: Tensor, bits: int) -> Tensor:
    """Numbers that are stored from 0 on as a weight has them: those of 8 bits around 0."""
    return (stored ^ 128).view(torch.int8) if bits == 8 else stored
